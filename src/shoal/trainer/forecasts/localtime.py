"""What a plan's step will take on this machine: its ranks rehearsed together and timed, the rest from measured constants.

How a schedule's cells follow one another, and which ranks then share the cores, is played by ``planner/local.py``.
"""

from dataclasses import dataclass

from shoal.core.plan import Plan
from shoal.planner.local import LocalTime, RankWork, predict_step
from shoal.planner.machine import Machine
from shoal.trainer.forecasts.company import Company, Timed
from shoal.trainer.forecasts.forecast import RankForecast
from shoal.trainer.forecasts.rehearsal import Subject
from shoal.trainer.layout import default_threads, derive_layout, schedule_of


@dataclass(frozen=True, kw_only=True)
class PlanTime:
    """A plan and what was predicted of it."""

    plan: Plan
    """Derived."""
    time: LocalTime
    ranks: tuple[RankForecast, ...]
    """All of them, in their order."""
    peak_bytes: tuple[int | None, ...]
    """The most memory that each will have; None where the system does not say."""


@dataclass
class Clock:
    """Times plans of one subject."""

    subject: Subject
    machine: Machine
    company: Company
    loaded_bytes: int = 0
    """Memory that data and the like take in every rank, beside the model."""

    def predict(self, plan: Plan) -> PlanTime:
        """The step of a plan.

        Raises:
            RequestError: it is asynchronous, does not fit the model, or has another number of ranks than there are processes.
        """
        plan = derive_layout(self.subject.recipe.train, plan).plan
        timed = self.company.rehearse(self.subject, plan)
        threads = self.subject.recipe.train.threads or default_threads(plan.world_size)
        per_place = plan.world_size // plan.pp
        places = [timed[start : start + per_place] for start in range(0, plan.world_size, per_place)]
        time = predict_step(
            plan,
            schedule_of(plan) if plan.pp > 1 else None,
            [_work(place, threads) for place in places],
            self.machine,
            slow_down=timed[0].slow_down,
        )
        common = self.machine.rank_bytes + self.loaded_bytes
        return PlanTime(
            plan=plan,
            time=time,
            ranks=tuple(rank.forecast for rank in timed),
            peak_bytes=tuple(None if rank.grown_bytes is None else common + rank.grown_bytes for rank in timed),
        )


def _work(place: list[Timed], threads: int) -> RankWork:
    """Of the ranks of one pipeline place: they do the same, and the slowest is waited for."""
    slowest = max(place, key=lambda rank: rank.seconds)
    account = {key: (traffic.calls, traffic.num_bytes) for key, traffic in slowest.forecast.traffic.items()}
    return RankWork(seconds=slowest.seconds, cells=slowest.cells, account=account, threads=threads)
