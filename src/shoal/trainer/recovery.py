"""Steps that are left out because their loss jumped, and when to go back: pure decisions from losses that all ranks have alike.

A jump is measured against the median of the last losses, which a few wild ones do not move. What is remembered is part of a run's
progress, so that a resumed run decides as the one that was left alone. No torch.
"""

import math
import statistics
from dataclasses import dataclass, replace

from shoal.trainer.config import TrainConfig

WINDOW = 16
"""Losses of taken steps that a loss is compared with."""
LEAST = 4
"""Fewer say nothing yet, and no step is left out."""
MOST_ROLLBACKS = 8
"""After so many the rate is not what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a run remembers of the steps that it left out."""

    losses: tuple[float, ...] = ()
    """Of the last steps that were taken, where ``train.spike`` asks for them."""
    left_out: int = 0
    """Steps in a row that were not taken, up to now."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint."""


def loss_limit(state: Recovery, config: TrainConfig) -> float:
    """The loss above which a step is not taken; infinite where none is too high."""
    if config.spike is None or len(state.losses) < LEAST:
        return math.inf
    usual = statistics.median(state.losses)
    # A loss that is negative, or nothing, has no multiple that would be too high.
    return config.spike * usual if usual > 0 else math.inf


def after_step(state: Recovery, loss: float, config: TrainConfig, *, is_taken: bool) -> Recovery:
    """What is remembered after one more step."""
    if not is_taken:
        return replace(state, left_out=state.left_out + 1)
    losses = (*state.losses, loss)[-WINDOW:] if config.spike is not None else ()
    return replace(state, losses=losses, left_out=0)


def wants_rollback(state: Recovery, config: TrainConfig) -> bool:
    """True when so many steps in a row were left out that the run goes back."""
    return config.rollback_after > 0 and state.left_out >= config.rollback_after


def rate_factor(state: Recovery, config: TrainConfig) -> float:
    """What the learning rate is multiplied by."""
    return config.rollback_rate**state.rollbacks


def after_rollback(state: Recovery, restored: Recovery) -> Recovery:
    """What is remembered after going back from ``state`` to a checkpoint that had ``restored``."""
    return replace(restored, left_out=0, rollbacks=state.rollbacks + 1)
