"""Why a plan, and why not another: where the time goes, as sentences made from estimates; and what to say when none fits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile

from shoal.core.errors import RequestError
from shoal.core.units import divisors
from shoal.planner.hardware.presets import GIB
from shoal.planner.pricing.cost import Known
from shoal.planner.pricing.job import Job
from shoal.planner.search.candidates import Limits, is_legal, plans_of
from shoal.planner.search.estimate import Estimate, estimate
from shoal.planner.search.search import Found

_WORTH = 0.005
"""Share of a step below which a difference is not worth a word."""


def time_parts(found: Estimate) -> Mapping[str, float]:
    """Seconds of a step by what they are spent on; they add up to the step."""
    parts, exposed = found.parts, found.exposed
    # Transfers that a software waits for are inside passes too; others are part of what ranks wait for each other.
    axes = ("tp", "cp", "ep") if parts.overlaps_transfer else ("tp", "cp", "ep", "pp")
    inside = {axis: share * found.seconds for axis, share in exposed.items() if axis in axes}
    bubble = found.bubble * (found.seconds - parts.after_pipeline)
    after = {
        "dp communication": exposed.get("dp", 0.0) * found.seconds,
        "update": parts.update,
        "fixed": parts.fixed,
        **({"codec": parts.codec} if parts.codec else {}),
        **({"agreement of islands": parts.agree} if parts.agree else {}),
    }
    compute = found.seconds - bubble - sum(inside.values()) - sum(after.values())
    named = {
        "compute": compute,
        "pipeline bubble": bubble,
        **{f"{axis} communication": s for axis, s in inside.items()},
    }
    return {**named, **after}


def explain(ranked: Sequence[Estimate]) -> list[str]:
    """Why the first plan of a ranking, beside the second, and why a slower one can be the first."""
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    spent = time_parts(best)
    shares = ", ".join(
        f"{name} {seconds / best.seconds:.0%}" for name, seconds in spent.items() if seconds / best.seconds >= _WORTH
    )
    lines = [f"{_name(best, second)}: {shares}"]
    if second is not None:
        lines += list(_differences(best, second))
    fastest = min(ranked, key=lambda one: one.seconds)
    if fastest.seconds < best.seconds:
        lines.append(
            f"{best.plan} comes first although {fastest.plan} is {best.seconds / fastest.seconds - 1:.1%} faster: times "
            "this close cannot be told apart, so the plan with the fewest keys is preferred"
        )
    return lines


def why_not(asked: Estimate, best: Estimate) -> list[str]:
    """Why a plan that somebody asks about is not the answer."""
    lines = []
    if not asked.fits:
        lines.append(
            f"{asked.plan} does not fit: its fullest rank needs {asked.memory.allocated / GIB:.1f} GiB and "
            f"{asked.limit / GIB:.1f} are free; {_largest(asked)}"
        )
    if (str(asked.plan), asked.precision) == (str(best.plan), best.precision):
        return [*lines, f"{asked.plan} is the fastest plan that was found"]
    return [*lines, *_differences(best, asked)]


def _largest(found: Estimate) -> str:
    parts = {
        name: value for name, value in found.memory.as_dict().items() if name not in ("allocated", "reserve", "device")
    }
    name = max(parts, key=lambda part: parts[part])
    cure = {
        "activations": "recompute, smaller microbatches or sequence parallelism would lower them",
        "optimizer": "zero=1 would share them out over dp",
        "gradients": "zero=2 would share them out over dp",
        "weights": "more tp, pp or zero=3 would share them out",
        "working": "smaller microbatches would lower it",
        "versions": "a schedule with one copy of the weights would lower it",
        "agreement": "zero inside islands would share it out, and sync=local or gossip keep less",
    }[name]
    return f"the largest part is {name} with {parts[name] / GIB:.1f} GiB; {cure}"


def _name(found: Estimate, beside: Estimate | None) -> str:
    """A plan, and its precision where the one beside it has another."""
    return (
        str(found.plan)
        if beside is None or beside.precision == found.precision
        else f"{found.plan} in {found.precision}"
    )


def _differences(best: Estimate, other: Estimate) -> Iterator[str]:
    slower = other.seconds / best.seconds - 1
    if abs(slower) < _WORTH / 10:
        yield f"{_name(other, best)} is as fast"
    else:
        word = "slower" if slower >= 0 else "faster"
        yield f"{_name(other, best)} is {abs(slower):.1%} {word}: {other.seconds:.4g} s in place of {best.seconds:.4g} s"
    own, theirs = time_parts(best), time_parts(other)
    names = dict.fromkeys([*own, *theirs])
    changes = {name: theirs.get(name, 0.0) - own.get(name, 0.0) for name in names}
    for name, change in sorted(changes.items(), key=lambda item: -abs(item[1])):
        if abs(change) / best.seconds >= _WORTH:
            verb = "more" if change > 0 else "less"
            yield f"  {name}: {abs(change):.3g} s {verb} ({own.get(name, 0.0):.3g} s against {theirs.get(name, 0.0):.3g} s)"


_MOST_DEVICES = 100_000
"""Of the smallest cluster that is looked for."""
_FEW_NODES = 64
_STEPS = 32


def smallest_cluster(job: Job, limits: Limits | None = None) -> Job | None:
    """The job on the smallest cluster of this kind, in whole nodes or parts of one, that it fits on; None beyond 100,000 devices.

    Beyond 64 nodes it is the smallest to within one in 32. The batch stays as it is where a plan that fits can share it out;
    where none can, it is rounded up to one that all devices share.
    """
    per_node = job.cluster.devices_per_node
    # What needs least: everything sharded, one sample at a time, and few of them under way.
    limits = replace(
        limits or Limits(), zero=(0, 1, 3), most_tensor=per_node, most_samples=1, schedules=("1f1b", "v-min")
    )
    # No plan has less than an even share of the weights and their state.
    states = job.chain.weights * (job.weight_bytes + job.optimizer_bytes)
    free = job.cluster.device.free_bytes
    if free <= 0:
        return None  # What a process has before its model fills the device.
    at_least = math.ceil(states / free)
    parts = [part for part in divisors(per_node) if at_least <= part < per_node]
    first = max(1, -(-at_least // per_node))
    # Doubling finds one that does.
    doubled = takewhile(lambda nodes: nodes * per_node <= _MOST_DEVICES, (first << shift for shift in count()))
    last = next((nodes for nodes in doubled if _fits_on(job, limits, nodes * per_node)), None)
    if last is None:
        return None
    for num_devices in (*parts, *(nodes * per_node for nodes in _between(first, last))):
        smaller = _fits_on(job, limits, num_devices)
        if smaller is not None:
            return smaller
    return _fits_on(job, limits, last * per_node)


def _between(first: int, last: int) -> Iterator[int]:
    """Numbers of nodes below one that does: all of the small ones, of large ones those that differ by one in 32.

    Half of ``last`` did not do, so of large numbers nothing below it is looked at again.
    """
    nodes = first if last <= _FEW_NODES else max(first, last // 2 + 1)
    while nodes < last:
        yield nodes
        nodes += max(1, nodes // _STEPS if nodes > _FEW_NODES else 1)


def _fits_on(job: Job, limits: Limits, num_devices: int) -> Job | None:
    """The job on so many devices, where some plan fits: with its own batch, or else with one that all of them share."""
    resized = replace(job, cluster=job.cluster.resized(num_devices))
    larger = max(job.global_batch, num_devices)
    shared = larger + -larger % num_devices
    jobs = (replace(resized, global_batch=batch) for batch in dict.fromkeys((job.global_batch, shared)))
    return next((one for one in jobs if _fits(one, limits)), None)


def _fits(job: Job, limits: Limits) -> bool:
    known: Known = {}
    plans = (replace(plan, recompute=recompute) for plan in plans_of(job, limits) for recompute in ("full", "none"))
    return any(is_legal(plan, limits) and estimate(job, plan, known).fits for plan in plans)


def _shared_batch(job: Job, limits: Limits) -> int | None:
    """The smallest batch above the job's own that some plan shares out over all devices."""
    above = job.global_batch + 1
    batches = {above + -above % replicas for replicas in divisors(job.cluster.num_devices)}
    jobs = (replace(job, global_batch=batch) for batch in sorted(batches))
    return next(
        (one.global_batch for one in jobs if any(is_legal(plan, limits) for plan in plans_of(one, limits))), None
    )


def refuse_small(job: Job, found: Found, limits: Limits | None = None) -> RequestError:
    """What to say when nothing fits: by how much, and the smallest cluster that would do.

    Args:
        job: in the precision of ``found.least``.
        found: what the search came to.
        limits: what it left out.
    """
    least = found.least
    if least is None:
        enough = _shared_batch(job, limits or Limits())
        fix = f"give --global-batch {enough}, or fewer devices" if enough else "give fewer devices"
        return RequestError(
            f"no plan shares out {job.cluster.num_devices} devices for a global batch of {job.global_batch}: the replicas of dp "
            f"must divide it, and {job.chain.name} cannot be cut into enough parts for so few of them; {fix}"
        )
    smallest = smallest_cluster(job, limits)
    advice = f"no cluster of up to {_MOST_DEVICES:,} of them holds it"
    if smallest is not None:
        batch = "" if smallest.global_batch == job.global_batch else f" with a global batch of {smallest.global_batch}"
        advice = f"it fits on {smallest.cluster.num_devices} devices{batch}"
    free = max(0.0, least.limit) / GIB
    return RequestError(
        f"{job.chain.name} in {job.precision} does not fit on {job.cluster.num_devices} x {job.cluster.device.name}: the plan "
        f"that needs least, {str(least.plan)!r}, needs {least.memory.allocated / GIB:.1f} GiB a device and {free:.1f} are free, "
        f"{-least.headroom / GIB:.1f} too few; {advice}"
    )
