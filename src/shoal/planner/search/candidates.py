"""Every plan that a search looks at: layouts that share out the devices, microbatch sizes, schedules, ZeRO stages.

Degrees are divisors, so the space is small. What a model does not allow (``Plan.problems``) is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, takewhile

from shoal.core.pipelines import DEFAULT_SCHEDULE, schedule_facts
from shoal.core.plan import Plan
from shoal.core.units import divisors
from shoal.planner.pricing.job import Job
from shoal.schedules.catalogue import find_family
from shoal.schedules.families.family import Size

_MOST_SAMPLES = 32
"""Samples of a microbatch that are tried at most; beyond them products get no better."""
_LONG = 8192
"""Tokens from which on a sequence is worth cutting over context-parallel ranks."""
_SPLIT = ("zb-h1", "zbv")
"""Schedules beside 1f1b and interleaved that every layout is tried with."""
MORE_SCHEDULES = ("zb-h2", "v-half", "v-min", "dualpipev", "looped-bfs")
"""Schedules that only the best layouts are tried with."""


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
    most_samples: int = _MOST_SAMPLES
    """Of a microbatch."""


def is_legal(plan: Plan, limits: Limits) -> bool:
    """Whether the model allows a plan; expert parallelism is priced before it is executed."""
    return not (plan if plan.ep == 1 else replace(plan, ep=1)).problems(limits.facts)


def has_size(plan: Plan) -> bool:
    """Whether the family of a pipeline's schedule can be had for its ranks and microbatches."""
    family = find_family(plan.schedule or DEFAULT_SCHEDULE)
    return not any(family.problems(Size(plan.pp, plan.microbatches or 1, plan.chunks or 1)))


def plans_of(job: Job, limits: Limits) -> Iterator[Plan]:
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
                if pipeline > num_units(job) or job.global_batch % data:
                    continue
                has_sequence = tensor > 1 and chain.tokens % (tensor * context) == 0
                layout = Plan(dp=data, tp=tensor, sp=has_sequence, cp=context, pp=pipeline)
                if has_sequence and not is_legal(layout, limits):
                    layout = replace(layout, sp=False)
                for kind, expert in product(_kinds(job, layout), _experts(job, data)):
                    yield from _filled(job, limits, replace(layout, cp_kind=kind, ep=expert))


def num_units(job: Job) -> int:
    """Layers that a pipeline can share out: the blocks, or all layers of a chain that has none."""
    first, end = job.chain.block_range
    return end - first


def _divides_heads(job: Job, tensor: int) -> bool:
    if tensor == 1:
        return True
    heads, kv_heads = job.chain.heads, job.chain.kv_heads
    has_pairs = any(layer.num_pairs for layer in job.chain.distinct)
    return has_pairs and (heads is None or heads % tensor == 0) and (kv_heads is None or kv_heads % tensor == 0)


def _kinds(job: Job, layout: Plan) -> tuple[str, ...]:
    """How attention can cross context-parallel ranks: around a ring, and, where they can share out the heads, all to all."""
    heads = job.chain.heads or 1
    return ("ring", "alltoall") if layout.cp > 1 and heads % (layout.tp * layout.cp) == 0 else ("ring",)


def _experts(job: Job, data: int) -> list[int]:
    experts = job.chain.experts
    if experts == 1:
        return [1]
    return [degree for degree in divisors(experts) if data % degree == 0 and degree <= 64]


def _filled(job: Job, limits: Limits, layout: Plan) -> Iterator[Plan]:
    data = layout.dp or 1
    per_replica = job.global_batch // data
    stages = [stage for stage in limits.zero if data > 1 or stage == 0]
    if layout.pp > 1:
        # Gradients stay whole until a pipeline's step is over, so stage 2 is stage 1 there.
        stages = [stage for stage in stages if stage != 2]
    for size in takewhile(lambda size: size <= limits.most_samples, divisors(per_replica)):
        microbatches = per_replica // size
        for schedule, chunks in _schedules(job, limits, layout, microbatches):
            for zero in stages:
                yield replace(layout, microbatches=microbatches, schedule=schedule, chunks=chunks, zero=zero)


def _schedules(job: Job, limits: Limits, layout: Plan, microbatches: int) -> Iterator[tuple[str | None, int | None]]:
    pipeline, blocks = layout.pp, num_units(job)
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
        if pipeline * per_rank <= blocks and has_size(own):
            yield name, own.chunks
