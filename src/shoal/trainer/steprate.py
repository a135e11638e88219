"""The learning rate of a step, from everything that has a say in it: the schedule, evaluations, rollbacks and ``optim.adapt``."""

from collections.abc import Iterable

from torch.optim import Optimizer

from shoal.engine.batches.schedule import describe_batches
from shoal.engine.callbacks.adapt import Adapt
from shoal.engine.config import Settings, TrainConfig
from shoal.engine.reporting import Reporter
from shoal.optim.adapt import describe_scale, growth_factor, held_decay
from shoal.optim.config import OptimConfig
from shoal.optim.groups import set_second_decay
from shoal.optim.rates import rate
from shoal.trainer.progress import Progress, rate_factor


class StepRate:
    """The rate of one step; a function that the engine asks when the step's gradient is known, because a rule may follow it."""

    def __init__(
        self, settings: Settings, progress: Progress, total_steps: int, adapt: Adapt | None, growth: float = 1.0
    ) -> None:
        step = progress.step if adapt is None else adapt.schedule_step(progress.step)
        self._adapt = adapt
        self._base = rate(settings.optim, step, total_steps) * progress.plateau.factor
        self._base *= rate_factor(progress.recovery, settings.train) * growth
        self.value = self._base
        """As it was last asked for."""

    def __call__(self) -> float:
        """The rate now."""
        self.value = self._base if self._adapt is None else self._base * self._adapt.factor
        return self.value


def window_rates(
    settings: Settings, progress: Progress, ticks: Iterable[int], total_updates: int, adapt: Adapt | None
) -> list[float]:
    """The rates of the updates of an asynchronous pipeline's window."""
    factor = progress.plateau.factor * (1.0 if adapt is None else adapt.factor)
    return [rate(settings.optim, tick, total_updates) * factor for tick in ticks]


class BatchGrowth:
    """What a batch that has grown since the first step makes of the rate (``optim.scale``) and of Adam's second moment.

    Args:
        optim: as the user wrote it; the rate of the first batch is scaled already.
        train: the first batch.
    """

    def __init__(self, optim: OptimConfig, train: TrainConfig) -> None:
        self.optim, self._first = optim, train.global_batch
        self._base = optim.scale_base or train.global_batch

    def __call__(self, batch: int, optimizer: Optimizer) -> float:
        """What the rate is multiplied by at a step of this batch; the optimizer is given its decay."""
        if self.optim.hold_half_life:
            set_second_decay(optimizer, held_decay(self.optim.betas[1], batch / self._base))
        return growth_factor(self.optim.scale, batch / self._first)


def build_adapt(
    optim: OptimConfig, train: TrainConfig, evaluate_every: int, reporter: Reporter
) -> tuple[Adapt | None, BatchGrowth]:
    """The rule of ``optim.adapt``, None without one, and that of growing batches. Prints the derived rates and batches."""
    for line in (describe_scale(optim, train.global_batch), describe_batches(train)):
        reporter.tell(*([line] if line else ()))
    adapt = None if optim.adapt == "none" else Adapt(optim, train, evaluate_every=evaluate_every)
    return adapt, BatchGrowth(optim, train)
