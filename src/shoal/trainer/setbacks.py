"""What becomes of a step whose loss or gradient nobody should learn from: it is traced, told, and left out or the end of the run.

The reduced values are the same on every rank, so all ranks come here together and decide alike.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from shoal.core.errors import FinalError
from shoal.core.events import LossSpiked, NonFinite, RolledBack
from shoal.data.loader import StepBatch
from shoal.engine.config import TrainConfig
from shoal.engine.hooks import StepResult
from shoal.engine.model import ParallelModel
from shoal.engine.nonfinite import trace_nonfinite
from shoal.engine.state import RankState
from shoal.trainer.persist import Persistence
from shoal.trainer.progress import MOST_ROLLBACKS, Progress, after_rollback, loss_limit, rate_factor

# Each is an event; on the terminal a run that skips every step would drown everything else.
_SKIPS_SAID = 5


class Setbacks:
    """Handles the steps of one rank that are not taken.

    Args:
        config: what is to become of them.
        engine: of the steps.
        persistence: the run's checkpoints.
    """

    def __init__(self, config: TrainConfig, engine: ParallelModel, persistence: Persistence) -> None:
        self._config = config
        self._engine = engine
        self._persistence = persistence
        self._reporter = persistence.reporter

    def handle(self, batch: StepBatch, result: StepResult, progress: Progress) -> bool:
        """Tell of a step that was not taken; ``progress`` is that before it. True when it counts as left out.

        Raises:
            FinalError: it is not finite, and ``train.nonfinite`` is stop; names rank and parameter.
        """
        step, scale = progress.step + 1, progress.loss_scale
        if result.is_finite:
            limit = loss_limit(progress.recovery, self._config)
            self._reporter.event(LossSpiked(step=step, loss=result.loss, limit=limit))
            self._warn(
                f"step {step}: loss {result.loss:g} is above {limit:g}, train.spike {self._config.spike:g} times the usual",
                progress,
            )
            return True
        if self._engine.precision.scales_loss and math.isfinite(result.loss) and scale.can_back_off:
            return False  # An overflow of the scaled gradient is how dynamic scaling finds its scale.
        origin = trace_nonfinite(self._engine, batch, step=progress.step, scale=scale.scale)
        action = self._config.nonfinite
        self._reporter.event(NonFinite(step=step, culprit_rank=origin.rank, what=origin.what, action=action))
        where = f"step {step}: {origin.what} is not finite on rank {origin.rank}"
        if action == "skip":
            self._warn(where, progress)
            return True
        raise FinalError(
            f"{where} (loss {result.loss}, gradient norm {result.grad_norm}); {self._persistence.fall_back()}. "
            "Resume with a lower optim.lr or with optim.clip, or set train.nonfinite=skip to leave such steps out"
        )

    def _warn(self, what: str, progress: Progress) -> None:
        if progress.skipped < _SKIPS_SAID:
            self._reporter.warn(f"{what}; the step is skipped on all ranks")

    def roll_back(self, progress: Progress, held_at: Callable[[Progress], RankState]) -> Progress:
        """Load the last good checkpoint, and go on from it with a lower rate: too many steps in a row were left out.

        Args:
            progress: of the run as it is.
            held_at: what this rank holds of a run that is so far, to be written to.

        Raises:
            FinalError: there is no good checkpoint, or the run has gone back often enough.
        """
        recovery = progress.recovery
        where = f"step {progress.step}: {recovery.left_out} steps in a row were left out"
        if recovery.rollbacks >= MOST_ROLLBACKS:
            raise FinalError(
                f"{where}, after {recovery.rollbacks} rollbacks with a lower rate each; {self._persistence.fall_back()}. "
                "Look at the data and the loss of these steps: going on with --resume meets them again. Where they were only "
                "above train.spike and finite, raise it; where they were not finite, lower optim.lr or set optim.clip"
            )
        restored = self._persistence.roll_back(held_at)
        if restored is None:
            raise FinalError(
                f"{where}, and there is no good checkpoint to go back to; lower optim.lr, or set checkpoint.every so that "
                "there is one"
            )
        after = replace(restored.progress, recovery=after_rollback(recovery, restored.progress.recovery))
        factor = rate_factor(after.recovery, self._config)
        self._reporter.event(RolledBack(step=progress.step, to_step=after.step, rate_factor=factor))
        self._reporter.warn(
            f"rolled back from step {progress.step} to step {after.step}; the rate is now {factor:g} of the recipe's"
        )
        return after
