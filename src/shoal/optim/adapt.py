"""Learning rates that follow what a run measures: each rule is a pure function of its state and of numbers that all ranks share.

    noise      measures the gradient noise scale and changes nothing
    adascale   noise, and the rate and the schedule's progress are multiplied by AdaScale's gain
    bold       raises the rate while the validation loss falls and lowers it when the loss rises
    hyper      hypergradient descent: the rate grows while gradients agree with the last update, and shrinks when they do not

torch has none of them. The numbers are made elsewhere (``engine/callbacks/adapt.py``); because a rule sees reduced numbers only,
every rank decides alike, and one process that is given the same numbers decides the same. States are JSON values in checkpoints.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shoal.core.errors import RunError
from shoal.optim.config import OptimConfig

_ADAM_LIKE = frozenset({"adam", "adamw", "adagrad", "lamb"})
_LEAST_VARIANCE = 1e-6
_MOST_LEVELS = 32


def scaled(config: OptimConfig, global_batch: int) -> OptimConfig:
    """The section with the rates, and the held decay, that follow for this batch, and nothing left to scale.

    Linear: the linear scaling rule of Goyal et al. 2017, for SGD. Square root: Krizhevsky 2014, and Malladi et al. 2022 for Adam.
    Rates of groups are scaled too.
    """
    factor = scale_factor(config, global_batch)
    if config.hold_half_life and config.scale_base is not None:
        held = held_decay(config.betas[1], global_batch / config.scale_base)
        config = config.model_copy(update={"betas": (config.betas[0], held), "hold_half_life": False})
    if factor == 1.0:
        return config
    groups = tuple(one if one.lr is None else one.model_copy(update={"lr": one.lr * factor}) for one in config.groups)
    return config.model_copy(update={"lr": config.lr * factor, "groups": groups, "scale": "none"})


def scale_factor(config: OptimConfig, global_batch: int) -> float:
    """What ``optim.scale`` multiplies rates by for a batch of this size."""
    if config.scale == "none" or config.scale_base is None:
        return 1.0
    return growth_factor(config.scale, global_batch / config.scale_base)


def growth_factor(scale: str, ratio: float) -> float:
    """What a rule of ``optim.scale`` multiplies rates by for a batch that is ``ratio`` times another."""
    if scale == "none":
        return 1.0
    return ratio if scale == "linear" else math.sqrt(ratio)


def held_decay(decay: float, ratio: float) -> float:
    """The decay that reaches back over as many samples with a batch of ``ratio`` times the size: ``decay ** ratio``.

    arXiv 2507.07101 holds the half-life of Adam's second moment constant in tokens.
    """
    return float(decay**ratio)


def describe_scale(config: OptimConfig, global_batch: int) -> str | None:
    """The derived rate for people; None where nothing is derived."""
    if config.scale == "none" or config.scale_base is None:
        return None
    lr = config.lr * scale_factor(config, global_batch)
    how = f"{global_batch} / {config.scale_base}"
    how = how if config.scale == "linear" else f"sqrt({how})"
    return f"optim.scale {config.scale}: learning rate {config.lr:g} x {how} = {lr:.6g}"


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What one step says of the noise: the squared gradients of its shares, and of all of them together."""

    small: float
    """Weighted mean of the squared norms of the shares' mean gradients."""
    large: float
    """Squared norm of the whole batch's mean gradient."""
    count: int
    """Number of shares; below two nothing can be measured."""


def mean_square(squares: Sequence[float], weights: Sequence[float]) -> tuple[float, int]:
    """``Shares.small`` and the number of shares.

    Args:
        squares: squared norm of each share's part of the whole gradient: its mean gradient times its weight.
        weights: of each share in the mean over the batch; they sum to 1. One of weight 0 is no share.

    A share with weight p has the variance of the whole divided by p. So the mean of squares that is weighted by p has the
    expectation that equal shares have, and a short last batch needs no other formula.
    """
    found = [square / weight for square, weight in zip(squares, weights, strict=True) if weight > 0]
    return math.fsum(found), len(found)


@dataclass(frozen=True, kw_only=True)
class NoiseState:
    """Moving averages of the two parts of a squared gradient, and AdaScale's progress."""

    square: float = 0.0
    """Of the true gradient's squared norm, with the bias of an average that began at zero."""
    variance: float = 0.0
    """Of the summed variance of a gradient of the base batch, with the same bias."""
    weight: float = 0.0
    """What the averages are divided by to take the bias out; 0 before anything was measured."""
    progress: float = 0.0
    """Steps of the base batch that the steps so far are worth; only adascale reads it."""
    level: int = 0
    """How often ``train.batch_schedule`` "noise" has doubled the batch."""

    @property
    def is_known(self) -> bool:
        """True when something was measured."""
        return self.weight > 0


def after_shares(state: NoiseState, found: Shares, *, scale: float, smoothing: float) -> NoiseState:
    """The averages after one more step; unchanged where it cannot be measured.

    McCandlish et al. 2018 (arXiv 1812.06162), with batches of one share and of all; averages without the bias of their beginning,
    as in Kingma & Ba 2015, at ``smoothing ** scale`` so that they reach back over as many samples with any batch
    (Qiao et al. 2021, AdaptDL).

    Args:
        state: before.
        found: in this step.
        scale: batch divided by base batch.
        smoothing: how much of an average stays after a base batch.
    """
    if found.count < 2 or not (math.isfinite(found.small) and math.isfinite(found.large)):
        return state
    square = (found.count * found.large - found.small) / (found.count - 1)
    variance = (found.small - found.large) * scale / (found.count - 1)
    stays = smoothing**scale
    return replace(
        state,
        square=stays * state.square + (1.0 - stays) * square,
        variance=stays * state.variance + (1.0 - stays) * variance,
        weight=stays * state.weight + (1.0 - stays),
    )


def averages(state: NoiseState) -> tuple[float, float]:
    """Squared norm of the true gradient, at least 0, and variance at the base batch, at least 1e-6; as AdaptDL bounds them."""
    if not state.is_known:
        return 0.0, _LEAST_VARIANCE
    return max(state.square / state.weight, 0.0), max(state.variance / state.weight, _LEAST_VARIANCE)


def noise_scale(state: NoiseState, base_batch: float) -> float | None:
    """The simple noise scale in samples (B_simple of McCandlish et al. 2018); None while it is not known.

    A batch well below it wastes no sample, one well above it saves few steps.
    """
    square, variance = averages(state)
    return variance * base_batch / square if state.is_known and square > 0 else None


def gain(state: NoiseState, *, scale: float) -> float:
    """AdaScale's gain, from 1 to ``scale`` (Johnson et al. 2020, AdaScale SGD); 1 while nothing is known."""
    if not state.is_known:
        return 1.0
    square, variance = averages(state)
    return (variance + square) / (variance / scale + square)


def rate_gain(name: str, gained: float) -> float:
    """What the rate is multiplied by: the gain, or its root under Adam and its kin (Qiao et al. 2021, AdaptDL)."""
    # A class of torch counts as Adam's kin unless it is SGD: the root is the smaller, and safer, step.
    is_rooted = name in _ADAM_LIKE or (name.startswith("torch.") and not name.endswith(".SGD"))
    return math.sqrt(gained) if is_rooted else gained


@dataclass(frozen=True, kw_only=True)
class BoldState:
    """What the bold driver remembers between evaluations."""

    best: float | None = None
    """Lowest validation loss that counted as a fall."""
    last: float | None = None
    """Of the evaluation before; infinite where that was not finite."""
    factor: float = 1.0
    """What the rate is multiplied by now."""


def after_evaluation(state: BoldState, loss: float, config: OptimConfig) -> BoldState:
    """The bold driver after one more evaluation (Vogl et al. 1988; Battiti 1989).

    A loss below the best by the threshold raises the rate, one above the last by the threshold lowers it, others change nothing.
    A loss that is not finite has risen.
    """
    threshold, factor = config.adapt_threshold, state.factor
    if not math.isfinite(loss):
        return replace(state, factor=_bounded(factor * config.adapt_lower, config))
    if state.best is None:
        return replace(state, best=loss, last=loss)
    last = state.best if state.last is None else state.last
    if loss < state.best - threshold * abs(state.best):
        return BoldState(best=loss, last=loss, factor=_bounded(factor * config.adapt_raise, config))
    if loss > last + threshold * abs(last):
        factor = _bounded(factor * config.adapt_lower, config)
    return replace(state, last=loss, factor=factor)


@dataclass(frozen=True, kw_only=True)
class HyperState:
    """What hypergradient descent remembers besides the last update, which is a tensor."""

    factor: float = 1.0
    """What the rate is multiplied by now."""


def after_cosine(state: HyperState, cosine: float, config: OptimConfig) -> HyperState:
    """The rate's factor at a step whose gradient has this cosine with the last update (Baydin et al. 2018, multiplicative).

    The update is what was subtracted from the weights: a gradient along it says that the step could have been longer.
    """
    if not math.isfinite(cosine):
        return state
    cosine = min(max(cosine, -1.0), 1.0)
    return HyperState(factor=_bounded(state.factor * (1.0 + config.adapt_step * cosine), config))


def _bounded(factor: float, config: OptimConfig) -> float:
    least, most = config.adapt_bounds
    return min(max(factor, least), most)


AdaptState = NoiseState | BoldState | HyperState


def begin(config: OptimConfig) -> AdaptState:
    """The state of the rule before the first step."""
    if config.adapt == "bold":
        return BoldState()
    return HyperState() if config.adapt == "hyper" else NoiseState()


def as_values(state: AdaptState) -> dict[str, Any]:
    """JSON for a checkpoint."""
    return asdict(state)


def from_values(config: OptimConfig, values: Mapping[str, Any]) -> AdaptState:
    """Back from a checkpoint's JSON.

    Raises:
        RunError: a value is none that a run can have.
    """
    empty = begin(config)
    known = {field.name: values[field.name] for field in fields(empty) if field.name in values}
    for name, value in known.items():
        is_number = type(value) in (int, float) and math.isfinite(value)
        is_absent = value is None and getattr(empty, name) is None
        is_wrong = (name == "factor" and value is not None and value <= 0) or (name == "weight" and value < 0)
        is_wrong |= name == "level" and not (type(value) is int and 0 <= value <= _MOST_LEVELS)
        if not (is_number or is_absent) or is_wrong:
            raise RunError(f"the checkpoint's state of optim.adapt is none: {name} is {str(value)[:80]!r}")
    return replace(empty, **known)
