"""The learning rate of every step, as a pure function: resuming needs no scheduler state except what evaluations decided.

torch's schedulers count calls and rewrite the optimizer; a resumed or restarted run then depends on how often they were called.
Here the rate depends on the step alone::

    step      0 .. warmup-1               warmup        ...        total_steps
    rate      lr (step+1)/(warmup+1)      lr            ...        final * lr (cosine, linear)

The rate is never zero at a step that is taken: warm-up begins above it, and a decay reaches its end when the last step is done.
"""

import math
from dataclasses import dataclass, replace

from shoal.optim.config import OptimConfig


@dataclass(frozen=True, kw_only=True)
class PlateauState:
    """What the plateau schedule remembers between evaluations."""

    best: float | None = None
    """Lowest loss that counted as an improvement; None before the first evaluation."""
    num_worse: int = 0
    """Evaluations in a row that did not improve on it."""
    factor: float = 1.0
    """What the rate is multiplied by now."""


def rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of the step with this index; the first step is 0. Plateau's ``factor`` comes on top of it.

    Args:
        config: the schedule and its numbers.
        step: steps done before this one.
        total_steps: steps of the whole run; cosine and linear stay at their final value from there on.
    """
    if step < config.warmup:
        share = (step + 1) / (config.warmup + 1)
    elif config.schedule in ("cosine", "linear"):
        share = _decay(config, step, total_steps)
    elif config.schedule == "inverse_sqrt":
        # Vaswani et al. 2017, equation 3, scaled to reach lr exactly where warm-up ends.
        share = math.sqrt((config.warmup + 1) / (step + 1))
    else:
        share = 1.0
    return config.lr * share


def _decay(config: OptimConfig, step: int, total_steps: int) -> float:
    """Fraction of ``lr`` after warm-up; Loshchilov & Hutter 2017 (SGDR), equation 5 without restarts, for the cosine."""
    progress = 1.0 if step >= total_steps else (step - config.warmup) / (total_steps - config.warmup)
    height = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    # A weighted mean is exact at both ends; final + (1 - final) * height is not.
    return height + (1.0 - height) * config.final


def after_evaluation(state: PlateauState, loss: float, config: OptimConfig) -> PlateauState:
    """The plateau's memory after one more evaluation; a NaN loss is no improvement, and other schedules remember nothing."""
    if config.schedule != "plateau":
        return state
    if _improves(state.best, loss, config.plateau_threshold):
        return replace(state, best=loss, num_worse=0)
    if state.num_worse + 1 < config.plateau_patience:
        return replace(state, num_worse=state.num_worse + 1)
    return replace(state, num_worse=0, factor=state.factor * config.plateau_factor)


def _improves(best: float | None, loss: float, threshold: float) -> bool:
    if best is None:
        return math.isfinite(loss)
    return loss < best - threshold * abs(best)
