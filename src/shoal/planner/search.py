"""Search for the fastest plan that fits: every layout by arithmetic, the best of them by their schedules.

Degrees are divisors, so the space is small: layouts (tp, cp, ep, pp, dp) x microbatch sizes x schedules x ZeRO stages, each with
as little recompute as fits. The times of layers are shared between plans (``cost.Known``), which makes a plan cost microseconds.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from shoal.core.combine import divisors
from shoal.core.errors import RequestError
from shoal.core.pipelines import DEFAULT_SCHEDULE, schedule_facts
from shoal.core.plan import Plan
from shoal.planner.cost import Known
from shoal.planner.estimate import Estimate, estimate, estimate_by_schedule
from shoal.planner.job import Job
from shoal.planner.memory import CONTEXT_BYTES
from shoal.planner.presets import GIB
from shoal.schedules.catalogue import find_family
from shoal.schedules.family import Size

_MOST_SAMPLES = 32
"""Samples of a microbatch that are tried at most; beyond them products get no better."""
_LONG = 8192
"""Tokens from which on a sequence is worth cutting over context-parallel ranks."""
_REFINED = 8
"""Plans of the arithmetic's ranking that are priced by their schedules."""
_ALIKE = 0.01
"""Share of a step by which two plans must differ for the faster one to be preferred to the simpler one."""
_SPLIT = ("zb-h1", "zbv")
"""Schedules beside 1f1b and interleaved that every layout is tried with; the best layouts are tried with all of ``_MORE``."""
_MORE = ("zb-h2", "v-half", "v-min", "dualpipev", "looped-bfs")
_MOST_DEVICES = 100_000
"""Of the smallest cluster that is looked for."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the search leaves out."""

    most_tensor: int | None = None
    """Tensor-parallel ranks at most; those of a node when left out, because they talk in every layer."""
    schedules: tuple[str, ...] | None = None
    """Only these."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    facts: object | None = None
    """What ``Plan.problems`` asks of the model; without it only divisibility by the chain's own numbers is looked at."""
    allow_experts: bool = True
    most_samples: int = _MOST_SAMPLES
    """Of a microbatch."""


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
    fitting: list[Estimate] = []
    refused: Estimate | None = None
    least: Estimate | None = None
    num_plans = 0
    for plan in _plans(job, limits):
        for recompute in ("none", "selective", "full"):
            candidate = replace(plan, recompute=recompute)
            if not _is_legal(candidate, limits):
                continue
            found = estimate(job, candidate, known)
            num_plans += 1
            if least is None or found.memory.allocated < least.memory.allocated:
                least = found
            if found.fits:
                fitting.append(found)
                break
            if refused is None or found.seconds < refused.seconds:
                refused = found
    ranked = _refine(job, limits, sorted(fitting, key=_time), top)
    # What was refused is of interest only where it would have been faster.
    if ranked and refused is not None and refused.seconds >= ranked[0].seconds:
        refused = None
    return Found(
        ranked=tuple(ranked[:top]),
        refused=refused,
        num_plans=num_plans,
        seconds=time.perf_counter() - start,
        least=least,
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


def _refine(job: Job, limits: Limits, fitting: Sequence[Estimate], top: int) -> list[Estimate]:
    """The best plans by their schedules, with every other schedule that their layout could have."""
    candidates: dict[str, Plan] = {}
    for found in fitting[: max(_REFINED, 2 * top)]:
        candidates.setdefault(str(found.plan), found.plan)
    if limits.schedules is None:
        for found in [one for one in fitting if one.plan.pp > 1][:1]:
            for name in _MORE:
                per_rank = schedule_facts(name).chunks
                other = replace(found.plan, schedule=name, chunks=per_rank if per_rank > 1 else None)
                candidates.setdefault(str(other), other)
    refined = []
    for plan in candidates.values():
        has_stages = plan.pp * (plan.chunks or 1) <= _num_units(job) and _has_size(plan)
        if not has_stages or not _is_legal(plan, limits):
            continue
        found = estimate_by_schedule(job, plan)
        if found.fits:
            refined.append(found)
    return _simplest_first(sorted(refined, key=_time))


def _is_legal(plan: Plan, limits: Limits) -> bool:
    # Expert parallelism is priced before it is executed.
    return not replace(plan, ep=1).problems(limits.facts)


def _has_size(plan: Plan) -> bool:
    """Whether the family of a pipeline's schedule can be had for its ranks and microbatches."""
    family = find_family(plan.schedule or DEFAULT_SCHEDULE)
    return not any(family.problems(Size(plan.pp, plan.microbatches or 1, plan.chunks or 1)))


def _plans(job: Job, limits: Limits) -> Iterator[Plan]:
    """Every layout with every microbatch size, schedule and ZeRO stage; recompute is chosen by memory."""
    chain, num_devices = job.chain, job.cluster.num_devices
    most_tensor = limits.most_tensor or job.cluster.devices_per_node
    for tensor in divisors(num_devices):
        if tensor > most_tensor or not _divides_heads(job, tensor):
            continue
        for context in divisors(num_devices // tensor):
            if context > 1 and (
                chain.tokens < _LONG or chain.tokens % (2 * context) or context > 16 or not chain.heads
            ):
                continue
            for pipeline in divisors(num_devices // (tensor * context)):
                data = num_devices // (tensor * context * pipeline)
                if pipeline > _num_units(job) or job.global_batch % data:
                    continue
                layout = Plan(
                    dp=data,
                    tp=tensor,
                    sp=tensor > 1 and chain.tokens % (tensor * context) == 0,
                    cp=context,
                    pp=pipeline,
                )
                for expert in _experts(job, limits, data):
                    yield from _filled(job, limits, replace(layout, ep=expert))


def _num_units(job: Job) -> int:
    """Layers that a pipeline can share out: the blocks, or all layers of a chain that has none."""
    first, end = job.chain.block_range
    return end - first


def _divides_heads(job: Job, tensor: int) -> bool:
    if tensor == 1:
        return True
    heads, kv_heads = job.chain.heads, job.chain.kv_heads
    has_pairs = any(layer.num_pairs for layer in job.chain.distinct)
    return has_pairs and (heads is None or heads % tensor == 0) and (kv_heads is None or kv_heads % tensor == 0)


def _experts(job: Job, limits: Limits, data: int) -> list[int]:
    experts = job.chain.experts
    if experts == 1 or not limits.allow_experts:
        return [1]
    return [degree for degree in divisors(experts) if data % degree == 0 and degree <= 64]


def _filled(job: Job, limits: Limits, layout: Plan) -> Iterator[Plan]:
    data = layout.dp or 1
    per_replica = job.global_batch // data
    stages = [stage for stage in limits.zero if data > 1 or stage == 0]
    if layout.pp > 1:
        # Gradients stay whole until a pipeline's step is over, so stage 2 is stage 1 there.
        stages = [stage for stage in stages if stage != 2]
    size = 1
    while size <= min(per_replica, limits.most_samples):
        if per_replica % size == 0:
            microbatches = per_replica // size
            for schedule, chunks in _schedules(job, limits, layout, microbatches):
                for zero in stages:
                    yield replace(layout, microbatches=microbatches, schedule=schedule, chunks=chunks, zero=zero)
        size *= 2


def _schedules(job: Job, limits: Limits, layout: Plan, microbatches: int) -> Iterator[tuple[str | None, int | None]]:
    pipeline, blocks = layout.pp, _num_units(job)
    if pipeline == 1:
        yield None, None
        return
    wanted = limits.schedules
    if wanted is None or "1f1b" in wanted:
        yield "1f1b", None
    if (wanted is None or "interleaved" in wanted) and microbatches % pipeline == 0:
        for chunks in range(2, 9):
            if blocks % (pipeline * chunks) == 0:
                yield "interleaved", chunks
    for name in _SPLIT if wanted is None else [one for one in wanted if one not in ("1f1b", "interleaved")]:
        per_rank = schedule_facts(name).chunks
        own = replace(layout, schedule=name, chunks=per_rank if per_rank > 1 else None, microbatches=microbatches)
        if pipeline * per_rank <= blocks and _has_size(own):
            yield name, own.chunks


def smallest_cluster(job: Job, limits: Limits | None = None) -> Job | None:
    """The job on the smallest cluster of this kind, in whole nodes or parts of one, that it fits on; None beyond 100,000 devices.

    A batch that the devices do not share is rounded up to one that they do.
    """
    per_node = job.cluster.devices_per_node
    # What needs least: everything sharded, one sample at a time, and few of them under way.
    limits = replace(
        limits or Limits(), zero=(0, 1, 3), most_tensor=per_node, most_samples=1, schedules=("1f1b", "v-min")
    )
    # No plan has less than an even share of the weights and their state.
    states = job.chain.weights * (job.weight_bytes + (job.state_bytes or job.stack.software.state_bytes))
    at_least = math.ceil(states / (job.cluster.device.memory_bytes - CONTEXT_BYTES))
    parts = [part for part in divisors(per_node) if at_least <= part < per_node]
    first = max(1, -(-at_least // per_node))
    # Doubling finds one that does; what is smaller is looked at one by one up to there.
    doubled = takewhile(lambda nodes: nodes * per_node <= _MOST_DEVICES, (first << shift for shift in count()))
    last = next((nodes for nodes in doubled if _fits_on(job, limits, nodes * per_node)), None)
    if last is None:
        return None
    for num_devices in (*parts, *range(first * per_node, last * per_node, per_node)):
        smaller = _fits_on(job, limits, num_devices)
        if smaller is not None:
            return smaller
    return _fits_on(job, limits, last * per_node)


def _fits_on(job: Job, limits: Limits, num_devices: int) -> Job | None:
    """The job on so many devices, where some plan fits."""
    batch = max(job.global_batch, num_devices)
    resized = replace(job, cluster=job.cluster.resized(num_devices), global_batch=batch + -batch % num_devices)
    known: Known = {}
    plans = (replace(plan, recompute=recompute) for plan in _plans(resized, limits) for recompute in ("full", "none"))
    fits = any(_is_legal(plan, limits) and estimate(resized, plan, known).fits for plan in plans)
    return resized if fits else None


def refuse_small(job: Job, found: Found, limits: Limits | None = None) -> RequestError:
    """What to say when nothing fits: by how much, and the smallest cluster that would do."""
    least = found.least
    if least is None:
        return RequestError(
            f"no plan shares out {job.cluster.num_devices} devices for a global batch of {job.global_batch}; give a batch that a "
            f"divisor of {job.cluster.num_devices} divides"
        )
    smallest = smallest_cluster(job, limits)
    advice = f"no cluster of up to {_MOST_DEVICES:,} of them holds it"
    if smallest is not None:
        batch = "" if smallest.global_batch == job.global_batch else f" with a global batch of {smallest.global_batch}"
        advice = f"it fits on {smallest.cluster.num_devices} devices{batch}"
    return RequestError(
        f"{job.chain.name} does not fit on {job.cluster.num_devices} x {job.cluster.device.name}: the plan that needs least, "
        f"{str(least.plan)!r}, needs {least.memory.allocated / GIB:.1f} GiB a device and {least.limit / GIB:.1f} are free, "
        f"{-least.headroom / GIB:.1f} too few; {advice}"
    )
