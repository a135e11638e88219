"""What a plan's step will take on this machine: its ranks rehearsed and timed in this process, the rest from measured constants.

Ranks of one pipeline place do the same, so the first of each is rehearsed. How a schedule's cells follow one another, and which
ranks then share the cores, is played by ``planner/local.py``.
"""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shoal.comm.rehearsal import rehearsed_world
from shoal.core.plan import Plan
from shoal.planner.local import LocalTime, RankWork, predict_step
from shoal.planner.machine import Machine
from shoal.schedules.action import Action, Kind
from shoal.schedules.schedule import Schedule
from shoal.trainer.forecast import RankForecast, read_trace
from shoal.trainer.layout import default_threads, derive_layout, schedule_of
from shoal.trainer.rehearsal import RankTrace, Subject, trace_rank

_WARM = 1
"""Steps that are not timed: the first makes buffers and lets DDP look."""
_TIMED = 3


@dataclass(frozen=True, kw_only=True)
class PlanTime:
    """A plan and what was predicted of it."""

    plan: Plan
    """Derived."""
    time: LocalTime
    first: tuple[RankForecast, ...]
    """The first rank of each pipeline place."""


@dataclass
class Clock:
    """Times plans of one subject."""

    subject: Subject
    machine: Machine
    num_timed: int = _TIMED

    def predict(self, plan: Plan) -> PlanTime:
        """The step of a plan.

        Raises:
            RequestError: it is asynchronous, or does not fit the model.
        """
        plan = derive_layout(self.subject.recipe.train, plan).plan
        threads = self.subject.recipe.train.threads or default_threads(plan.world_size)
        schedule = schedule_of(plan) if plan.pp > 1 else None
        per_place = plan.world_size // plan.pp
        with computing_with(threads):
            traces = [self._trace(plan, place * per_place) for place in range(plan.pp)]
        works = [_work(trace, schedule, place, threads) for place, trace in enumerate(traces)]
        time = predict_step(plan, schedule, works, self.machine)
        return PlanTime(plan=plan, time=time, first=tuple(read_trace(trace) for trace in traces))

    def _trace(self, plan: Plan, rank: int) -> RankTrace:
        with rehearsed_world(rank, plan.world_size) as world:
            return trace_rank(self.subject, plan, world=world, num_steps=_WARM + self.num_timed)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Inside, torch computes with as many threads as a rank will."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _work(trace: RankTrace, schedule: Schedule | None, place: int, threads: int) -> RankWork:
    timed = trace.steps[_WARM:]
    seconds = statistics.median(step.seconds for step in timed)
    cells: Mapping[Action, float] = {}
    if schedule is not None:
        cells = _smooth([{cell.action: cell.seconds for cell in step.cells} for step in timed])
        tail = statistics.median(step.seconds - step.cell_seconds for step in timed)
        seconds = tail + sum(cells.values())
    account = {
        (str(axis), str(operation)): (traffic.calls, traffic.num_bytes)
        for (axis, operation), traffic in trace.steps[-1].account.items()
    }
    return RankWork(seconds=seconds, cells=cells, account=account, threads=threads)


def _smooth(steps: list[dict[Action, float]]) -> dict[Action, float]:
    """What an action takes: the median over all microbatches of its stage and kind, which do the same."""
    by_kind: dict[tuple[Kind, int], list[float]] = {}
    for step in steps:
        for action, seconds in step.items():
            by_kind.setdefault((action.kind, action.stage), []).append(seconds)
    return {action: statistics.median(by_kind[action.kind, action.stage]) for action in steps[0]}
