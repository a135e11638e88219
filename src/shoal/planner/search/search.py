"""Search for the fastest plan that fits: every layout by arithmetic, the best of them by their schedules.

Layouts (tp, cp, ep, pp, dp) x microbatch sizes x schedules x ZeRO stages (``candidates.py``), each with as little recompute as
fits. The times of layers are shared between plans (``cost.Known``).

A search over layouts with experts and long sequences has fifty thousand plans and goes on with ten. A lower bound of a layout's
time (``cost.least_seconds``) costs next to nothing, so plans are visited in the order of that bound, and those whose bound is
beyond all that the search goes on with are never priced (``Cutoff``).
"""

import math
import time
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.planner.pricing.cost import Known, least_seconds
from shoal.planner.pricing.job import Job
from shoal.planner.pricing.memory import Memory
from shoal.planner.search.candidates import MORE_SCHEDULES, Limits, has_size, is_legal, num_units, plans_of
from shoal.planner.search.estimate import Estimate, estimate, estimate_by_schedule, memory_of, not_executed

_REFINED = 8
"""Plans of the arithmetic's ranking that are priced by their schedules."""
_REFUSED = 4
"""Plans that do not fit, the fastest by arithmetic, that are priced by their schedules: the times beside which they are shown
are made so, and a closed form may be off by a twentieth either way."""
_EXECUTED = 2
"""Plans that Shoal executes, priced by their schedules where the best are none."""
_PIPELINES = 3
"""Layouts with a pipeline that are tried with every schedule there is."""
_RECOMPUTE = ("none", "selective", "full")
"""From the fastest to what holds least."""
_LEAN = ("v-half", "v-min")
"""Schedules that hold the fewest microbatches (Qi et al. 2024, arXiv:2405.15362): a half and a third of what 1f1b does."""
AS_GOOD = 1.01
"""Times the fastest step up to which a simpler plan is preferred: times are not known to one part in a hundred."""
_SIMPLER = 12
"""Simpler plans of the arithmetic's ranking that are tried for being as good by their schedules, at most."""
_FAR = 1.05
"""Times the best step by arithmetic beyond which a schedule is not worth working through."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    ranked: tuple[Estimate, ...]
    """The fastest that fit, best first."""
    refused: Estimate | None
    """The fastest that does not fit, be it slower than those that do; None where all fit."""
    num_plans: int
    """That were priced, or left out because their layout takes too long at least."""
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
    passes = [_price_all(job, limits, top, known)]
    if not passes[0].fitting and limits.schedules is None:
        # Schedules that hold least are not tried with every layout; now they are the last resort.
        passes.append(_price_all(job, replace(limits, schedules=_LEAN), top, known))
    last = passes[-1]
    fitting = [one for _, one in sorted(last.fitting, key=lambda pair: (_time(pair[1]), pair[0]))]
    refined = _refine(job, limits, fitting, top, known)
    ranked = sorted((one for one in refined if one.fits), key=_time)
    # A simpler plan may be as good as the best, and where none of the best fits by its schedule, who asks wants to hear what
    # needs least of all.
    fitting += _price_left_out(job, limits, last, ranked[0].seconds * AS_GOOD if ranked else math.inf, known)
    simpler = _simpler(job, ranked, fitting)
    ranked = _simplest_first(ranked, [one for one in simpler if one.fits])
    refused = [one for each in passes for one in _refine_refused(job, each)]
    refused += [one for one in (*refined, *simpler) if not one.fits]
    needs = [each.least for each in passes if each.least is not None]
    return _found(
        ranked,
        min(refused, key=lambda one: one.seconds, default=None),
        estimate(job, min(needs, key=lambda one: one[0])[2], known) if needs else None,
        top=top,
        num_plans=sum(each.num_plans for each in passes),
        seconds=time.perf_counter() - start,
    )


@dataclass(kw_only=True)
class _Priced:
    """What the arithmetic found. Places are those among all plans: the first of equals counts."""

    fitting: list[tuple[int, Estimate]] = field(default_factory=list)
    """With their places."""
    left_out: list[tuple[float, int, Plan]] = field(default_factory=list)
    """Plans that cannot be among the best: what they take at least, the shortest first, and their places."""
    refused: list[tuple[float, int, Estimate]] = field(default_factory=list)
    """The few fastest that do not fit: seconds and places."""
    least: tuple[float, int, Plan] | None = None
    """Bytes, place and plan of the one that needs the least memory."""
    num_plans: int = 0

    @property
    def refused_seconds(self) -> float:
        """Beyond which nobody asks what else does not fit."""
        return self.refused[-1][0] if len(self.refused) == _REFUSED else math.inf


def _price_all(job: Job, limits: Limits, top: int, known: Known) -> _Priced:
    """Every plan that may matter by closed forms, each with as little recompute as fits."""
    found = _Priced()
    cutoff = Cutoff(
        precision=job.precision,
        num_best=_num_refined(top),
        num_executed=_EXECUTED,
        num_pipelines=_PIPELINES if limits.schedules is None else 0,
    )
    plans = list(plans_of(job, limits))
    fitting: set[int] = set()
    # The least that takes longest comes last, so a plan has less recompute before it has more.
    for seconds, place, recompute in sorted(_least_times(job, plans, known)):
        if place in fitting:
            continue
        plan = replace(plans[place], recompute=_RECOMPUTE[recompute])
        if cutoff.is_beyond(plan, seconds):
            found.left_out.append((seconds, place, plan))
            continue
        places = _measure(job, limits, found, place, plan, seconds, known)
        if places is not None:
            fitting.add(place)
            fits = estimate(job, plan, known, places=places)
            found.fitting.append((place, fits))
            cutoff.add(fits)
    return found


def _price_left_out(job: Job, limits: Limits, found: _Priced, seconds: float, known: Known) -> list[Estimate]:
    """Price what was left out, fits and takes less than ``seconds`` at least; note the fastest of it that do not fit.

    Where these are found already, few are looked at. Where too few are, all are, for their memory alone: nothing else tells
    that there are no more.
    """
    fitting: list[Estimate] = []
    fitted: set[int] = set()
    for least, place, plan in found.left_out:
        # What fits would fit with more recompute too.
        if place in fitted or least >= max(seconds, found.refused_seconds):
            found.num_plans += 1
        elif (places := _measure(job, limits, found, place, plan, least, known)) is not None:
            fitted.add(place)
            if least < seconds:
                fitting.append(estimate(job, plan, known, places=places))
    return fitting


def _least_times(job: Job, plans: Sequence[Plan], known: Known) -> Iterator[tuple[float, int, int]]:
    """What each plan takes at least with each recompute, with its place and the recompute's."""
    times: list[float] = []
    last: tuple[object, ...] = ()
    for place, plan in enumerate(plans):
        # Plans of one layout and microbatch size take the same, and come together.
        key = (layout_of(plan), plan.sp, plan.cp_kind, plan.microbatches)
        if key != last:
            times = [least_seconds(job, replace(plan, recompute=recompute), known) for recompute in _RECOMPUTE]
            last = key
        yield from ((seconds, place, recompute) for recompute, seconds in enumerate(times))


def _measure(
    job: Job, limits: Limits, found: _Priced, place: int, plan: Plan, seconds: float, known: Known
) -> tuple[Memory, ...] | None:
    """The memory of a plan that takes ``seconds`` at least; None where it does not fit, which is noted, or is not legal."""
    if not is_legal(plan, limits):
        return None
    found.num_plans += 1
    places = memory_of(job, plan)
    needs = max(each.allocated for each in places)
    if found.least is None or (needs, place) < found.least[:2]:
        found.least = (needs, place, plan)
    if needs <= job.cluster.device.free_bytes:
        return places
    # What does not fit needs a time only to be among the fastest refused.
    if seconds <= found.refused_seconds:
        priced = estimate(job, plan, known, places=places)
        insort(found.refused, (priced.seconds, place, priced), key=lambda one: one[:2])
        del found.refused[_REFUSED:]
    return None


def _found(
    ranked: Sequence[Estimate],
    refused: Estimate | None,
    least: Estimate | None,
    *,
    top: int,
    num_plans: int,
    seconds: float,
) -> Found:
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
        _simplest_first(sorted(ranked, key=_time), []),
        min(refused, key=lambda one: one.seconds, default=None),
        min(least, key=lambda one: one.memory.allocated, default=None),
        top=top,
        num_plans=sum(part.num_plans for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


def _time(found: Estimate) -> tuple[float, int, float]:
    """Faster first; among equals the plan with fewer keys, then the one with less memory."""
    return (float(f"{found.seconds:.4g}"), len(str(found.plan)), found.memory.allocated)


def _simplest_first(ranked: Sequence[Estimate], others: Sequence[Estimate]) -> list[Estimate]:
    """The ranking with the simplest plan of those as good as its fastest in front, be it one of the others."""
    if not ranked:
        return []
    alike = [one for one in (*ranked, *others) if one.seconds <= ranked[0].seconds * AS_GOOD]
    best = min(alike, key=lambda one: (_num_keys(one), one.seconds))
    return [best, *(one for one in ranked if one is not best)]


def _simpler(job: Job, ranked: Sequence[Estimate], fitting: Sequence[Estimate]) -> list[Estimate]:
    """A plan of the arithmetic's ranking that is as good as the best by its schedule, and simpler; none where there is none.

    It need not be among the first few: the arithmetic flatters pipelines of few microbatches, and those are many. Before it
    come those that its schedule showed not to fit.
    """
    if not ranked:
        return []
    enough = ranked[0].seconds * AS_GOOD
    fewest = min(_num_keys(one) for one in ranked if one.seconds <= enough)
    known = {str(one.plan) for one in ranked}
    simpler = [
        one for one in fitting if _num_keys(one) < fewest and one.seconds <= enough and str(one.plan) not in known
    ]
    simpler.sort(key=lambda one: (_num_keys(one), one.seconds))
    tried: list[Estimate] = []
    for one in simpler[:_SIMPLER]:
        found = estimate_by_schedule(job, one.plan)
        if not found.fits:
            tried.append(found)
        elif found.seconds <= enough:
            return [*tried, found]
    return tried


def _num_keys(found: Estimate) -> int:
    """How much a plan asks for; the usual schedule is nothing to ask for."""
    return len(str(found.plan).split()) - (found.plan.schedule == "1f1b")


def _refine(job: Job, limits: Limits, fitting: Sequence[Estimate], top: int, known: Known) -> list[Estimate]:
    """The best plans by their schedules, with every other schedule that their layout could have; some of these do not fit."""
    candidates: dict[str, Plan] = {}
    best = fitting[: _num_refined(top)]
    if all(found.not_executed for found in best):
        # Somebody who wants to train now wants one that runs.
        best = [*best, *islice((found for found in fitting if not found.not_executed), _EXECUTED)]
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
    return [estimate_by_schedule(job, plan) for plan in candidates.values()]


def _refine_refused(job: Job, found: _Priced) -> list[Estimate]:
    """The fastest that do not fit by their schedules; by closed forms, where these promise too little and the schedules fit."""
    by_schedule = [estimate_by_schedule(job, one.plan) for _, _, one in found.refused]
    return [one for one in by_schedule if not one.fits] or [one for _, _, one in found.refused[:1]]


def _num_refined(top: int) -> int:
    return max(_REFINED, 2 * top)


def _is_near(found: Estimate, best: Estimate) -> bool:
    return found.seconds <= _FAR * best.seconds


def _best_pipelines(fitting: Sequence[Estimate]) -> list[Plan]:
    """The best plan of each of the best layouts that have a pipeline."""
    found: dict[tuple[object, ...], Plan] = {}
    for one in fitting:
        if len(found) == _PIPELINES:
            break
        if one.plan.pp > 1:
            found.setdefault(layout_of(one.plan), one.plan)
    return list(found.values())


_ALIKE = 1.002
"""Times that differ by less may change places: a ranking goes by four digits, and by simplicity among equals."""


@dataclass(kw_only=True)
class Cutoff:
    """How long the slowest takes of the plans that a search goes on with, as far as they are found."""

    precision: str
    num_best: int
    """Plans that the search goes on with."""
    num_executed: int
    """Plans that Shoal executes, with which it goes on too."""
    num_pipelines: int
    """Layouts with a pipeline, with which it goes on too; the best plan of each."""
    _best: dict[object, float] = field(default_factory=dict)
    _executed: dict[object, float] = field(default_factory=dict)
    _pipelines: dict[object, float] = field(default_factory=dict)

    def add(self, found: Estimate) -> None:
        """Take note of a plan that fits."""
        _keep(self._best, found.plan, found.seconds, self.num_best)
        if not found.not_executed:
            _keep(self._executed, found.plan, found.seconds, self.num_executed)
        if found.plan.pp > 1:
            _keep(self._pipelines, layout_of(found.plan), found.seconds, self.num_pipelines)

    def is_beyond(self, plan: Plan, least: float) -> bool:
        """Whether a plan that takes so long at least cannot be among those that the search goes on with."""
        return (
            least > _slowest(self._best, self.num_best)
            and (plan.pp == 1 or least > _slowest(self._pipelines, self.num_pipelines))
            and (least > _slowest(self._executed, self.num_executed) or bool(not_executed(plan, self.precision)))
        )


def layout_of(plan: Plan) -> tuple[object, ...]:
    """How a plan shares out the devices."""
    return (plan.dp, plan.tp, plan.cp, plan.pp, plan.ep)


def _keep(times: dict[object, float], key: object, seconds: float, most: int) -> None:
    """The few fastest, each key once."""
    times[key] = min(seconds, times.get(key, math.inf))
    if len(times) > most:
        del times[max(times, key=lambda each: times[each])]


def _slowest(times: dict[object, float], most: int) -> float:
    """Beyond which nothing is kept any more."""
    return _ALIKE * max(times.values(), default=0.0) if len(times) >= most else math.inf
