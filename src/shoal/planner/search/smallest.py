"""The smallest cluster of a kind that holds a model, and what to say when the one that was asked about does not."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile

from shoal.core.combine import divisors
from shoal.core.errors import RequestError
from shoal.planner.hardware.presets import GIB
from shoal.planner.pricing.cost import Known
from shoal.planner.pricing.job import Job
from shoal.planner.search.candidates import Limits, is_legal, plans_of
from shoal.planner.search.estimate import estimate
from shoal.planner.search.search import Found

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
