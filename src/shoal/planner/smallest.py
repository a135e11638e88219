"""The smallest cluster of a kind that holds a model, and what to say when the one that was asked about does not."""

import math
from dataclasses import replace
from itertools import count, takewhile

from shoal.core.combine import divisors
from shoal.core.errors import RequestError
from shoal.planner.candidates import Limits, is_legal, plans_of
from shoal.planner.cost import Known
from shoal.planner.estimate import estimate
from shoal.planner.job import Job
from shoal.planner.memory import CONTEXT_BYTES
from shoal.planner.presets import GIB
from shoal.planner.search import Found

_MOST_DEVICES = 100_000
"""Of the smallest cluster that is looked for."""


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
    plans = (replace(plan, recompute=recompute) for plan in plans_of(resized, limits) for recompute in ("full", "none"))
    fits = any(is_legal(plan, limits) and estimate(resized, plan, known).fits for plan in plans)
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
