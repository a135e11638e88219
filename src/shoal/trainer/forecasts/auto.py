"""Picks a plan for this machine: legal plans are rehearsed, family by family, and the one whose step is predicted shortest wins.

A family is a way of sharing out the processes (dp, tp, cp, pp). One plain plan of each is timed first; then the variants of the
best families, ZeRO stages, sequence parallelism, kinds of attention and schedules. What is never picked: asynchronous schedules
and parameter servers, because they change what is computed; recompute, because it only costs time, unless memory is short.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import psutil

from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan, all_plans
from shoal.parallel.rules import describe_facts
from shoal.trainer.forecasts.localtime import Clock, PlanTime
from shoal.trainer.forecasts.rehearsal import Subject
from shoal.trainer.layout import check_samples, check_settings, derive_layout

_BEST_FAMILIES = 2
_CLOSE = 1.05
"""Plans within this of the best are timed again, longer, before one is picked."""
_AGAIN = 3
_BUDGET_SECONDS = 45.0
_MEMORY_SHARE = 0.9
"""Of the memory that is free now."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was picked, and from what."""

    ranked: tuple[PlanTime, ...]
    """All plans that were rehearsed, the best first."""
    num_legal: int
    """Synchronous plans that the model, the batch and the number of processes allow, without recompute."""
    seconds: float
    """How long it took to look."""
    remarks: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    """Plans that turned out not to fit the model, and why."""

    @property
    def best(self) -> PlanTime:
        """The pick."""
        return self.ranked[0]


def legal_plans(subject: Subject, num_processes: int, *, recompute: str = "none") -> list[Plan]:
    """The synchronous plans over so many processes that the model and the recipe allow, derived; plain ones first."""
    recipe = subject.recipe
    facts = describe_facts(subject.anatomy, subject.model)
    found: list[Plan] = []
    for plan in all_plans(num_processes, facts):
        if plan.recompute != recompute or (plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous):
            continue
        try:
            check_settings(recipe.train, plan)
            check_samples(num_samples=len(subject.data.train), replicas=plan.num_shares)
            derived = derive_layout(recipe.train, plan).plan
        except RequestError:
            continue
        if derived not in found:
            found.append(derived)
    return found


def pick_plan(clock: Clock, num_processes: int, *, budget_seconds: float = _BUDGET_SECONDS) -> Choice:
    """The plan with the shortest predicted step.

    Args:
        clock: times plans of the recipe's model.
        num_processes: that the plan must use, all of them.
        budget_seconds: after which no further variant is looked at.

    Raises:
        RequestError: no synchronous plan runs on so many processes.
    """
    started = time.monotonic()
    subject = clock.subject
    plans = legal_plans(subject, num_processes)
    if not plans:
        raise RequestError(
            f"no plan for {num_processes} processes fits the model and global_batch {subject.recipe.train.global_batch}; "
            "change --nproc or train.global_batch"
        )
    found: dict[Plan, PlanTime] = {}
    refused: dict[str, str] = {}
    remarks: list[str] = []
    for plan in _in_order(plans, found):
        if time.monotonic() - started > budget_seconds and found:
            remarks.append(
                f"looked for {budget_seconds:g} s: {len(plans) - len(found)} of {len(plans)} plans were not tried"
            )
            break
        try:
            found[plan] = clock.predict(plan)
        except RequestError as refusal:
            refused[str(plan)] = str(refusal).splitlines()[0]
    if not found:
        raise RequestError(next(iter(refused.values())))
    _time_again(clock, found)
    ranked = sorted(found.values(), key=lambda timed: timed.time.seconds)
    ranked, told = _within_memory(clock, ranked)
    return Choice(
        ranked=tuple(ranked),
        num_legal=len(plans),
        seconds=time.monotonic() - started,
        remarks=(*remarks, *told),
        refused=refused,
    )


def family_of(plan: Plan) -> tuple[int, int, int, int]:
    """How a plan shares out the processes."""
    return plan.dp or 1, plan.tp, plan.cp, plan.pp


def _in_order(plans: Sequence[Plan], found: dict[Plan, PlanTime]) -> Iterator[Plan]:
    """One plan of each family, then the other plans of the best families; ``found`` fills up in between."""
    families: dict[tuple[int, int, int, int], list[Plan]] = {}
    for plan in plans:
        families.setdefault(family_of(plan), []).append(plan)
    for members in families.values():
        yield _plainest(members)
    tried = sorted(found.values(), key=lambda timed: timed.time.seconds)
    for timed in tried[:_BEST_FAMILIES]:
        for plan in families[family_of(timed.plan)]:
            if plan not in found:
                yield plan


def _plainest(members: Sequence[Plan]) -> Plan:
    """The plan of a family with nothing added; of a pipeline the default schedule."""
    return min(
        members, key=lambda plan: (plan.zero, plan.sp, plan.cp_kind != "ring", plan.schedule not in (None, "1f1b"))
    )


def _time_again(clock: Clock, found: dict[Plan, PlanTime]) -> None:
    """Two rehearsals of one plan differ by some percent; those that are close get the mean of two."""
    ranked = sorted(found.values(), key=lambda timed: timed.time.seconds)
    close = [timed for timed in ranked if timed.time.seconds <= ranked[0].time.seconds * _CLOSE][:_AGAIN]
    for timed in close if len(close) > 1 else []:
        again = clock.predict(timed.plan)
        mean = (timed.time.seconds + again.time.seconds) / 2
        found[timed.plan] = replace(again, time=replace(again.time, seconds=mean))


def _within_memory(clock: Clock, ranked: list[PlanTime]) -> tuple[list[PlanTime], list[str]]:
    """Plans that fit this machine's memory first, and what to say of the others."""
    limit = psutil.virtual_memory().available * _MEMORY_SHARE
    fits = [timed for timed in ranked if _held_bytes(clock, timed) <= limit]
    if len(fits) == len(ranked):
        return ranked, []
    rest = [timed for timed in ranked if timed not in fits]
    smallest = min(_held_bytes(clock, timed) for timed in rest)
    told = f"{len(rest)} plans need {smallest / 2**30:.1f} GiB or more, and {limit / 2**30:.1f} GiB are free"
    return (fits or rest) + (rest if fits else []), [told]


def _held_bytes(clock: Clock, timed: PlanTime) -> float:
    """What all ranks together hold at most; activations left out where the system does not say."""
    return sum(
        clock.machine.rank_bytes + rank.state_bytes if peak is None else peak
        for rank, peak in zip(timed.ranks, timed.peak_bytes, strict=True)
    )
