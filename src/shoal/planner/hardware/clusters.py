"""A cluster as it is written in ``--cluster``: devices by name, nodes, and the link between nodes if it is not the usual one.

A machine file of ``shoal calibrate`` is a cluster too, whose devices are its processes. What was measured is what is reached,
so a measured device has no share of a peak to lose: its constants are 1, but for what nobody measured. All numbers are those of
as many processes at once as are planned for: they share cores, caches and memory (``_together``).

    device    the rate of the largest matrix product in float32, bytes a copy reads and writes, an even share of the memory
    kernel    what the smallest product takes beyond its flops and bytes
    link      the line through the smallest and the largest all-reduce between ranks that compute (``Machine.collective_seconds``)
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shoal.core.errors import RequestError, offer
from shoal.planner.hardware.devices import Cluster, Device, DeviceConfig, Tier, parse_cluster
from shoal.planner.hardware.machine import CopyTime, Machine, MatmulTime, measurement_warnings, read_machine
from shoal.planner.hardware.presets import LINKS, build_cluster
from shoal.planner.hardware.software import Constants

_FILE = re.compile(r".*(/|\.json\b)")
"""A path, or a name that ends like a machine file's; no device has either."""
_SIZE = re.compile(r":[0-9]+(x[0-9]+)?$")


def read_cluster(text: str, own: Mapping[str, DeviceConfig] | None = None) -> Cluster:
    """The cluster that ``NAME:NODESxDEVICES`` says, or ``NAME:NODESxDEVICES@LINK`` with another link between its nodes.

    Args:
        text: a preset, a name of ``own`` or a machine file; nodes, devices of each, and a name of ``LINKS``.
        own: devices by the user's own numbers.

    Raises:
        RequestError: the text is something else, the device or the link is unknown, or the file is no machine file.
    """
    devices, at, name = _at_link(text)
    if at and not name.strip():
        raise RequestError(
            f"cluster {text!r} names no link after @; leave @ out for the usual one, or give one of {', '.join(LINKS)}"
        )
    cluster = _of_file(devices.strip()) if _FILE.match(devices) else build_cluster(devices, own)
    if not at:
        return cluster
    wanted = name.strip().lower()
    if wanted not in LINKS:
        raise RequestError(
            f"cluster {text!r}: there is no link {name.strip()!r}; {offer(wanted, LINKS)}there are {', '.join(LINKS)}"
        )
    # A port a device, but for processes of one machine.
    sharing = 1 if cluster.reached is None else cluster.tiers[0].devices
    if cluster.beyond is not None:
        # One node has nothing to join; the link counts where --devices makes more of it.
        return replace(cluster, beyond=_joined(cluster.beyond, wanted, sharing))
    return replace(cluster, tiers=(*cluster.tiers[:-1], _joined(cluster.tiers[-1], wanted, sharing)))


def _at_link(text: str) -> tuple[str, str, str]:
    """What is before @, @ if there is one, and the link; one in the folders of a path is none."""
    folder, slash, last = text.rpartition("/")
    devices, at, name = last.partition("@")
    return folder + slash + devices, at, name


def _of_file(text: str) -> Cluster:
    """``FILE``, ``FILE:PROCESSES`` or ``FILE:MACHINESxPROCESSES``."""
    path, _, size = text.rpartition(":") if _SIZE.search(text) else (text, "", "")
    # The machine need not be this one: that is what planning is for.
    try:
        machine = read_machine(Path(path), is_here=False)
    except RequestError as refusal:
        raise RequestError(
            f"cluster {text!r}: {refusal}; or name a device in place of a path, such as a100-80gb:16x8"
        ) from None
    if not size:
        return measured_cluster(machine, path=path)
    if 0 in (numbers := [int(part) for part in size.split("x")]):
        raise RequestError(f"cluster {text!r} has no process; write {path}:PROCESSES or {path}:MACHINESxPROCESSES")
    parts = parse_cluster(f"file:{'x'.join(map(str, numbers))}")
    return measured_cluster(machine, path=path, num_nodes=parts.num_nodes, num_processes=parts.devices_per_node)


def _joined(tier: Tier, name: str, sharing: int) -> Tier:
    link = LINKS[name]
    return Tier(
        name=name,
        devices=tier.devices,
        bandwidth=link.bandwidth / sharing,
        latency=link.latency,
        source=link.source,
        is_mesh=link.is_mesh,
    )


BETWEEN = "ethernet-10g"
"""The link between machines of one file, where nobody names another: a file knows one machine."""
_ITEM = 4
"""Bytes of a float32."""


def measured_cluster(machine: Machine, *, path: str, num_nodes: int = 1, num_processes: int | None = None) -> Cluster:
    """Machines like the one that was measured.

    Args:
        machine: its numbers.
        path: of its file.
        num_nodes: machines.
        num_processes: of each; the most that were measured without sharing a core when left out.

    Raises:
        RequestError: so many processes were not measured, or the file does not know the machine's memory.
    """
    counts = sorted({time.processes for time in machine.matmuls} & {time.processes for time in machine.copies})
    count = num_processes or max((each for each in counts if each <= machine.provenance.cores), default=counts[0])
    if count not in counts:
        several = -(-count // max(counts))
        machines = f", or {path}:{several}x{max(counts)} for {several} such machines" if several > 1 else ""
        raise RequestError(
            f"{path} was measured with {', '.join(map(str, counts))} processes, and {count} are asked for; write "
            f"{' or '.join(f'{path}:{each}' for each in counts)}{machines}"
        )
    if not machine.memory_bytes:
        raise RequestError(
            f"{path} does not say how much memory its machine has, as files of before do not; run `shoal calibrate {path}` there"
        )
    device, launch = _device(machine, count)
    inner = _link(machine, count)
    link = LINKS[BETWEEN]
    outer = Tier(
        name=BETWEEN,
        devices=num_nodes * count,
        # A machine has one port, which its processes share.
        bandwidth=link.bandwidth / count,
        latency=link.latency,
        source=link.source,
    )
    reached = Constants(matmul=1.0, memory=1.0, link=1.0, launch=launch, attention=1.0, sync=0.0, reserve=0.0)
    if num_nodes == 1:
        return Cluster(
            device=device, tiers=(inner,), beyond=outer, reached=reached, warnings=measurement_warnings(machine, path)
        )
    return Cluster(device=device, tiers=(inner, outer), reached=reached, warnings=measurement_warnings(machine, path))


def _source(machine: Machine) -> str:
    return f"shoal calibrate, {machine.provenance.date}"


def _device(machine: Machine, count: int) -> tuple[Device, float]:
    """One of so many processes, and the seconds of a kernel that are neither flops nor bytes."""
    slower = machine.fit.compute
    copy, timed = _together(machine, count)
    # A copy reads and writes every byte.
    bandwidth = 2 * copy.num_bytes / (copy.seconds * slower)
    products = sorted(timed, key=_flops)
    small, large = products[0], products[-1]
    # Planned products take their flops and then their bytes: the bytes of the one that was timed are not flops.
    computing = max(large.seconds * slower - _moved(large) / bandwidth, large.seconds * slower / 2)
    peak = _flops(large) / computing
    launch = max(0.0, small.seconds * slower - _flops(small) / peak - _moved(small) / bandwidth)
    device = Device(
        name=machine.provenance.cpu,
        peak_flops={"float32": peak},
        memory_bytes=machine.memory_bytes / count,
        memory_bandwidth=bandwidth,
        source=_source(machine),
        context_bytes=float(machine.rank_bytes),
    )
    return device, launch


def _together(machine: Machine, count: int) -> tuple[CopyTime, list[MatmulTime]]:
    """What a copy and the products take in each of so many processes that all compute.

    Of processes that share cores, a call that is shorter than a slice of the scheduler's was often timed as if it had a core
    for itself: files of before have four processes on two cores as fast as two. What a training step loses (``slow_down``) was
    timed over whole steps, so no call is taken to lose less than that beside the processes that have a core each, nor less than
    the cores that are missing.
    """
    copies = {time.processes: time for time in machine.copies}
    products = [time for time in machine.matmuls if time.processes == count]
    threads, cores = products[0].threads, machine.provenance.cores
    apart = [
        time.processes
        for time in machine.matmuls
        if time.threads == threads and time.processes * threads <= cores and time.processes in copies
    ]
    if count * threads <= cores or not apart:
        return copies[count], products
    known = max(apart)
    slowed = machine.slow_down(count, threads) / machine.slow_down(known, threads)
    factor = max(slowed, count * threads / cores)
    alone = {(time.rows, time.inner, time.outer): time.seconds for time in machine.matmuls if time.processes == known}

    def least(time: MatmulTime) -> float:
        return factor * alone.get((time.rows, time.inner, time.outer), 0.0)

    copy = copies[count]
    slow_copy = copy.model_copy(update={"seconds": max(copy.seconds, factor * copies[known].seconds)})
    return slow_copy, [time.model_copy(update={"seconds": max(time.seconds, least(time))}) for time in products]


def _flops(time: MatmulTime) -> float:
    return 2.0 * time.rows * time.inner * time.outer


def _moved(time: MatmulTime) -> float:
    return float(_ITEM * (time.rows * time.inner + time.inner * time.outer + time.rows * time.outer))


def _link(machine: Machine, count: int) -> Tier:
    """What joins the processes, such that a sum over all of them takes what was measured (``collectives.all_reduce``)."""
    sizes = sorted({time.num_bytes for time in machine.collectives if time.operation == "all_reduce"})
    if count == 1 or len(sizes) < 2:
        source = "one process" if count == 1 else "not measured: a copy in memory"
        return Tier(name="memory", devices=count, bandwidth=LINKS["memory"].bandwidth, latency=0.0, source=source)
    first, last = sizes[0], sizes[-1]
    at_first, at_last = (
        machine.collective_seconds("all_reduce", size, ranks=count, processes=count) * machine.fit.communication
        for size in (first, last)
    )
    per_byte = max((at_last - at_first) / (last - first), 1e-15)
    # Small sums go by a tree, large ones around a ring.
    hops, passes = 2 * math.ceil(math.log2(count)), 2 * (count - 1) / count
    return Tier(
        name="memory",
        devices=count,
        bandwidth=passes / per_byte,
        latency=max(0.0, at_first - per_byte * first) / hops,
        source=_source(machine),
    )
