"""Search for the fastest plan that fits: every layout by arithmetic, the best of them by their schedules.

Layouts (tp, cp, ep, pp, dp) x microbatch sizes x schedules x ZeRO stages (``candidates.py``), each with as little recompute as
fits. The times of layers are shared between plans (``cost.Known``), which makes a plan cost microseconds.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.planner.candidates import MORE_SCHEDULES, Limits, has_size, is_legal, num_units, plans_of
from shoal.planner.cost import Known
from shoal.planner.estimate import Estimate, estimate, estimate_by_schedule
from shoal.planner.job import Job

_REFINED = 8
"""Plans of the arithmetic's ranking that are priced by their schedules."""
_PIPELINES = 3
"""Layouts with a pipeline that are tried with every schedule there is."""
_LEAN = ("v-half", "v-min")
"""Schedules that hold the fewest microbatches (Qi et al. 2024, arXiv:2405.15362): a half and a third of what 1f1b does."""
_FAR = 1.05
"""Times the best step by arithmetic beyond which a schedule is not worth working through."""
_ALIKE = 0.01
"""Share of a step by which two plans must differ for the faster one to be preferred to the simpler one."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    ranked: tuple[Estimate, ...]
    """The fastest that fit, best first."""
    refused: Estimate | None
    """The fastest that does not fit."""
    num_plans: int
    seconds: float
    """How long the search took."""
    least: Estimate | None = field(default=None)
    """The one that needs the least memory, where none fits."""
    runnable: Estimate | None = field(default=None)
    """The fastest that Shoal executes today, where no plan of the ranking is one."""


def search(job: Job, limits: Limits | None = None, *, top: int = 5) -> Found:
    """The best plans for a job.

    Args:
        job: what is trained, and on what.
        limits: what to leave out.
        top: how many plans are wanted.
    """
    limits = limits or Limits()
    start = time.perf_counter()
    known: Known = {}
    looked = _look(job, limits, known)
    if not looked.fitting and limits.schedules is None:
        # Schedules that hold least are not tried with every layout; now they are the last resort.
        lean = _look(job, replace(limits, schedules=_LEAN), known)
        looked = _Looked(
            fitting=lean.fitting,
            refused=looked.refused,
            least=min((looked.least, lean.least), key=lambda one: one.memory.allocated if one else math.inf),
            num_plans=looked.num_plans + lean.num_plans,
        )
    ranked = _refine(job, limits, sorted(looked.fitting, key=_time), top, known)
    refused = looked.refused
    if refused is not None:
        refused = estimate(job, refused.plan, known, every_place=True)
    seconds = time.perf_counter() - start
    return _found(ranked, refused, looked.least, top=top, num_plans=looked.num_plans, seconds=seconds)


@dataclass(kw_only=True)
class _Looked:
    """What the arithmetic found."""

    fitting: list[Estimate] = field(default_factory=list)
    refused: Estimate | None = None
    """The fastest that does not fit."""
    least: Estimate | None = None
    num_plans: int = 0


def _look(job: Job, limits: Limits, known: Known) -> _Looked:
    """Every plan by closed forms, each with as little recompute as fits."""
    found = _Looked()
    for plan in plans_of(job, limits):
        for recompute in ("none", "selective", "full"):
            candidate = replace(plan, recompute=recompute)
            if not is_legal(candidate, limits):
                continue
            one = estimate(job, candidate, known)
            found.num_plans += 1
            if found.least is None or one.memory.allocated < found.least.memory.allocated:
                found.least = one
            if one.fits:
                found.fitting.append(one)
                break
            if found.refused is None or one.seconds < found.refused.seconds:
                found.refused = one
    return found


def _found(
    ranked: Sequence[Estimate],
    refused: Estimate | None,
    least: Estimate | None,
    *,
    top: int,
    num_plans: int,
    seconds: float,
) -> Found:
    # What was refused is of interest only where it would have been faster.
    if ranked and refused is not None and refused.seconds >= ranked[0].seconds:
        refused = None
    runnable = None
    if all(one.not_executed for one in ranked[:top]):
        runnable = next((one for one in ranked if not one.not_executed), None)
    return Found(
        ranked=tuple(ranked[:top]),
        refused=refused,
        num_plans=num_plans,
        seconds=seconds,
        least=least,
        runnable=runnable,
    )


def merge(parts: Sequence[Found], *, top: int) -> Found:
    """Searches of one job in several precisions as one ranking."""
    ranked = [one for part in parts for one in (*part.ranked, *([part.runnable] if part.runnable else []))]
    refused = [part.refused for part in parts if part.refused is not None]
    least = [part.least for part in parts if part.least is not None]
    return _found(
        _simplest_first(sorted(ranked, key=_time)),
        min(refused, key=lambda one: one.seconds, default=None),
        min(least, key=lambda one: one.memory.allocated, default=None),
        top=top,
        num_plans=sum(part.num_plans for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


def _time(found: Estimate) -> tuple[float, int, float]:
    """Faster first; among equals the plan with fewer keys, then the one with less memory."""
    return (float(f"{found.seconds:.4g}"), len(str(found.plan)), found.memory.allocated)


def _simplest_first(ranked: list[Estimate]) -> list[Estimate]:
    """The same with the shortest plan of those as good as the best in front: times are not known to one part in a hundred."""
    if not ranked:
        return ranked
    alike = [one for one in ranked if one.seconds <= ranked[0].seconds * (1 + _ALIKE)]
    best = min(alike, key=lambda one: (len(str(one.plan).split()), one.seconds))
    return [best, *(one for one in ranked if one is not best)]


def _refine(job: Job, limits: Limits, fitting: Sequence[Estimate], top: int, known: Known) -> list[Estimate]:
    """The best plans by their schedules, with every other schedule that their layout could have."""
    candidates: dict[str, Plan] = {}
    best = fitting[: max(_REFINED, 2 * top)]
    if all(found.not_executed for found in best):
        # Somebody who wants to train now wants one that runs.
        best = [*best, *islice((found for found in fitting if not found.not_executed), 2)]
    for found in best:
        candidates.setdefault(str(found.plan), found.plan)
    if limits.schedules is None:
        for layout in _best_pipelines(fitting):
            for name in MORE_SCHEDULES:
                per_rank = schedule_facts(name).chunks
                other = replace(layout, schedule=name, chunks=per_rank if per_rank > 1 else None)
                has_stages = other.pp * (other.chunks or 1) <= num_units(job) and has_size(other)
                # To work a schedule through takes a tenth of a second: what is far behind by arithmetic is left out.
                if has_stages and is_legal(other, limits) and _is_near(estimate(job, other, known), fitting[0]):
                    candidates.setdefault(str(other), other)
    refined = []
    for plan in candidates.values():
        found = estimate_by_schedule(job, plan)
        if found.fits:
            refined.append(found)
    return _simplest_first(sorted(refined, key=_time))


def _is_near(found: Estimate, best: Estimate) -> bool:
    return found.seconds <= _FAR * best.seconds


def _best_pipelines(fitting: Sequence[Estimate]) -> list[Plan]:
    """The best plan of each of the best layouts that have a pipeline."""
    found: dict[tuple[object, ...], Plan] = {}
    for one in fitting:
        if len(found) == _PIPELINES:
            break
        if one.plan.pp > 1:
            found.setdefault((one.plan.dp, one.plan.tp, one.plan.cp, one.plan.pp, one.plan.ep), one.plan)
    return list(found.values())
