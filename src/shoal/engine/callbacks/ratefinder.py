"""Which learning rate to begin with: a few steps at rates that grow, the loss of each, and everything put back afterwards.

The rate grows by a constant factor from step to step (Smith 2017, "cyclical learning rates"). Losses are over the global batch
and the same bits on every rank, so all ranks end the search at the same step. Weights, buffers, optimizer state, rates and random
states are then as they were: a run that searched ends in the weights of one that did not.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from shoal.core.errors import RequestError
from shoal.data.loading.loader import StepBatch
from shoal.engine.model import ParallelModel
from shoal.telemetry.rngstate import keeping_draws

_SMOOTHING = 0.9
_DIVERGED = 4.0
"""Times the lowest smoothed loss at which a search ends."""
_FEWEST = 5


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """What a search for a learning rate found; the same on every rank."""

    rates: tuple[float, ...]
    """Of the optimizer's first group, step by step; other groups keep their ratio to it."""
    losses: tuple[float, ...]
    """Of the global batch, before the update at that rate."""
    suggestion: float | None
    """Where the smoothed loss falls fastest; None where it never falls."""


def find_rate(
    model: ParallelModel, batches: Iterable[StepBatch], *, low: float, high: float, num_steps: int, step: int = 0
) -> RateCurve:
    """Take steps at growing rates, and put everything back. All ranks call it together.

    Args:
        model: with the optimizer whose rate is sought.
        batches: of at least as many steps; fewer shorten the search.
        low: the first rate.
        high: the last one.
        num_steps: how many rates are tried; the search ends before when the loss diverges.
        step: of the run, which dropout is drawn by.

    Raises:
        RequestError: the rates do not grow, or the plan's stages update by themselves.
    """
    if not 0 < low < high or num_steps < _FEWEST:
        raise RequestError(
            f"a search needs 0 < low < high and at least {_FEWEST} steps; it was given low={low}, high={high}, "
            f"num_steps={num_steps}"
        )
    if model.asynchronous is not None:
        raise RequestError(
            "stages of an asynchronous pipeline update by themselves; search the rate under a synchronous plan"
        )
    groups = model.optimizer.param_groups
    before = [group["lr"] for group in groups]
    ratios = [lr / before[0] if before[0] else 1.0 for lr in before]
    saved = {name: tensor.detach().clone() for name, tensor in model.state(step).tensors.items()}
    rates: list[float] = []
    losses: list[float] = []
    with model.hooks.silent(), keeping_draws():
        try:
            for place, batch in zip(range(num_steps), batches, strict=False):
                rate = low * (high / low) ** (place / (num_steps - 1))
                losses.append(model.forward_backward(batch, step=step + place))
                rates.append(rate)
                is_over = has_diverged(losses)
                model.end_step(is_taken=not is_over)
                if is_over:
                    break
                for group, ratio in zip(groups, ratios, strict=True):
                    group["lr"] = rate * ratio
                model.update()
                if not model.publishes_by_itself:
                    model.reduction.publish()
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr
            _put_back(model, saved, step)
    return RateCurve(rates=tuple(rates), losses=tuple(losses), suggestion=steepest(rates, losses))


@torch.no_grad()
def _put_back(model: ParallelModel, saved: dict[str, torch.Tensor], step: int) -> None:
    for name, tensor in model.state(step).tensors.items():
        tensor.copy_(saved[name])
    model.reduction.publish()


def has_diverged(losses: Sequence[float]) -> bool:
    """True where the newest loss is not finite, or the smoothed loss is far above its lowest."""
    if not math.isfinite(losses[-1]):
        return True
    smooth = smoothed(losses)
    return len(losses) >= _FEWEST and smooth[-1] > _DIVERGED * min(smooth)


def smoothed(losses: Iterable[float]) -> list[float]:
    """The exponential mean of losses, without the bias of its beginning."""
    found: list[float] = []
    mean = 0.0
    for place, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        found.append(mean / (1 - _SMOOTHING**place))
    return found


def steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The rate at which the smoothed loss falls fastest in the logarithm of the rate; None where it never falls."""
    usable = [place for place, loss in enumerate(losses) if math.isfinite(loss)]
    smooth = smoothed(losses[place] for place in usable)
    slopes = {
        place: (smooth[place + 1] - smooth[place - 1]) / math.log(rates[place + 1] / rates[place - 1])
        for place in range(1, len(smooth) - 1)
    }
    if not slopes:
        return None
    best = min(slopes, key=lambda place: slopes[place])
    return rates[best] if slopes[best] < 0 else None
