"""The learning rate of a step, from everything that has a say in it: the schedule, evaluations, rollbacks and ``optim.adapt``."""

from collections.abc import Iterable

from shoal.engine.callbacks.adapt import Adapt
from shoal.engine.config import Settings, TrainConfig
from shoal.engine.reporting import Reporter
from shoal.optim.adapt import describe_scale
from shoal.optim.config import OptimConfig
from shoal.optim.rates import rate
from shoal.trainer.progress import Progress, rate_factor


class StepRate:
    """The rate of one step; a function that the engine asks when the step's gradient is known, because a rule may follow it."""

    def __init__(self, settings: Settings, progress: Progress, total_steps: int, adapt: Adapt | None) -> None:
        step = progress.step if adapt is None else adapt.schedule_step(progress.step)
        self._adapt = adapt
        self._base = rate(settings.optim, step, total_steps) * progress.plateau.factor
        self._base *= rate_factor(progress.recovery, settings.train)
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


def build_adapt(optim: OptimConfig, train: TrainConfig, evaluate_every: int, reporter: Reporter) -> Adapt | None:
    """The rule of ``optim.adapt``, None without one. Prints the rate that ``optim.scale`` derives, where it does."""
    if line := describe_scale(optim, train.global_batch):
        reporter.tell(line)
    return None if optim.adapt == "none" else Adapt(optim, train, evaluate_every=evaluate_every)
