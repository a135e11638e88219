"""Which host each rank is on, and what follows from it: where sums can go over two levels, and which axes cross a cable.

A host is what can share memory: one machine and one space of process ids on it. Two containers of a machine that do not see each
other's processes are two hosts here.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shoal.comm.world import World
from shoal.core.axes import Axis

_NEAR = (Axis.TENSOR, Axis.CONTEXT)
"""Axes that exchange inside every layer."""


def host_key() -> int:
    """A number that two processes have in common when they are on one host."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text())
        except OSError:
            parts.append("")
    parts += [] if all(parts) else [os.uname().nodename]
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def find_hosts(world: World) -> tuple[int, ...]:
    """The host of every rank, numbered in the order of their first ranks. Collective, once for each world."""
    if world.hosts is None:
        if world.size == 1 or world.is_rehearsed:
            world.hosts = (0,) * world.size
        else:
            world.hosts = number_hosts([int(key) for key in world.all_gather(torch.tensor([host_key()]))])
    return world.hosts


def number_hosts(keys: Sequence[int]) -> tuple[int, ...]:
    """Host numbers by rank out of host keys by rank."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def ranks_by_host(ranks: Sequence[int], hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of a group host by host, in the order of the hosts' first ranks."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(hosts[rank], []).append(rank)
    return list(found.values())


def has_two_levels(ranks: Sequence[int], hosts: Sequence[int]) -> bool:
    """True where a group spans hosts, each has equally many of its ranks, at least two, and these follow one another.

    Elsewhere a sum in the order of ranks would cross between hosts with every term, or hosts would have no partners.
    """
    pieces = ranks_by_host(ranks, hosts)
    sizes = {len(piece) for piece in pieces}
    return (
        len(pieces) > 1
        and len(sizes) == 1
        and sizes.pop() > 1
        and [r for piece in pieces for r in piece] == list(ranks)
    )


def warn_of_crossings(
    groups: Mapping[Axis, Sequence[Sequence[int]]], degrees: Mapping[Axis, int], hosts: Sequence[int]
) -> tuple[str, ...]:
    """A warning where tp or cp, which exchange inside every layer, cross between hosts; none where neither does.

    Args:
        groups: the groups of ranks along each axis.
        degrees: ranks along each axis.
        hosts: host of every rank.
    """
    num_hosts = len(set(hosts))
    if num_hosts == 1:
        return ()
    crossing = [axis for axis in _NEAR if any(len({hosts[rank] for rank in ranks}) > 1 for ranks in groups[axis])]
    if not crossing:
        return ()
    first = next(ranks for ranks in groups[crossing[0]] if len({hosts[rank] for rank in ranks}) > 1)
    where = ", ".join(f"rank {rank} on host {hosts[rank]}" for rank in first)
    words = " and ".join(axis.value for axis in crossing)
    near = degrees[Axis.TENSOR] * degrees[Axis.CONTEXT]
    sizes = [list(hosts).count(host) for host in range(num_hosts)]
    if all(size % near == 0 for size in sizes):
        # Enough room on every host: only the order of ranks is in the way.
        mend = (
            f"number the ranks host by host (SLURM: --distribution=block, Open MPI: --map-by slot, MPICH: -ppn {sizes[0]}), so "
            "that pp and dp cross between hosts instead"
        )
    else:
        mend = f"tp * cp = {near} does not divide the {min(sizes)} ranks of a host; choose a plan in which it does"
    return (f"{words} crosses between hosts, inside every layer ({where}): {mend}",)
