"""The ranks of a run as a grid, one axis per way of dividing the work, and a channel along each.

Ranks are numbered with ``islands`` slowest and ``tp`` fastest (``core/axes.py``), so that the axis with the most traffic lies on
the nearest neighbours. torch's ``DeviceMesh`` makes the process groups; the channels over them are ours, because they count what
they move and pick shared memory where they can.
"""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.comm.channel import Channel, EchoTransport, SilentTransport, Transport
from shoal.comm.hosts import find_hosts, has_two_levels, ranks_by_host, warn_of_crossings
from shoal.comm.leaving.connecting import abortable_connecting
from shoal.comm.leaving.connections import noted_connections
from shoal.comm.packetfilter import sealed_listeners
from shoal.comm.shared import SharedTransport, build_shared_transport
from shoal.comm.threaded import ThreadedTransport
from shoal.comm.torchgroup import TorchTransport
from shoal.comm.trafficcounter import TrafficCounter
from shoal.comm.twolevel import TwoLevelTransport
from shoal.comm.world import World, wait_longer
from shoal.core.axes import Axis
from shoal.core.logical import rounds_of
from shoal.core.plan import Plan

GRID = (Axis.ISLAND, Axis.PIPELINE, Axis.DATA, Axis.CONTEXT, Axis.TENSOR)
INSIDE = (Axis.PIPELINE, Axis.DATA, Axis.CONTEXT, Axis.TENSOR)
"""The axes inside an island, which is the whole run where there is one."""


class Mesh:
    """Where this rank stands, and a channel to its neighbours along each axis."""

    def __init__(
        self,
        *,
        degrees: Mapping[Axis, int],
        coordinates: Mapping[Axis, int],
        channels: Mapping[Axis, Channel],
        replicas: Channel,
        everyone: Channel,
        traffic: TrafficCounter,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        num_logical: int = 0,
    ) -> None:
        self.degrees = degrees
        self.num_logical = num_logical or degrees[Axis.DATA]
        """Replicas that the plan has; more than lie along ``dp`` where some are absent."""
        self.follows_present = False
        """The batch grows and shrinks with the replicas that are present."""
        self.coordinates = coordinates
        self.channels = channels
        self.replicas = replicas
        """The ranks with the same weights and different data or positions: dp and cp together, dp slowest."""
        self.everyone = everyone
        """All ranks of this rank's island: of the run, where it is not divided into islands."""
        self.traffic = traffic
        self.groups = groups or {}
        self.warnings: tuple[str, ...] = ()
        """What the user should know of how the axes lie on hosts."""
        self._own_groups: list[dist.ProcessGroup] = []
        self._background: list[Channel] = []

    def has(self, axis: Axis) -> bool:
        """True when more than one rank lies along the axis."""
        return self.degrees[axis] > 1

    def degree(self, axis: Axis) -> int:
        """Ranks along the axis."""
        return self.degrees[axis]

    def coordinate(self, axis: Axis) -> int:
        """This rank's place along the axis."""
        return self.coordinates[axis]

    def channel(self, axis: Axis) -> Channel:
        """The ranks that differ from this one along this axis only."""
        return self.channels[axis]

    @property
    def replica(self) -> int:
        """The number of this rank's replica among those of all islands."""
        return self.coordinates[Axis.ISLAND] * self.degrees[Axis.DATA] + self.coordinates[Axis.DATA]

    @property
    def has_absent(self) -> bool:
        """True when those present compute the shares of absent replicas too."""
        return self.num_logical > self.degrees[Axis.DATA]

    def num_sharing(self, plan: Plan) -> int:
        """The replicas that share a step's batch out: the plan's, or those present where the batch follows them."""
        return self.degrees[Axis.DATA] if self.follows_present else plan.num_shares

    @property
    def rounds(self) -> tuple[int | None, ...]:
        """The logical replica that this rank's replica computes in each round of a step; its own, where none is absent."""
        place, present = self.coordinates[Axis.DATA], self.degrees[Axis.DATA]
        return rounds_of(place, num_logical=self.num_logical, num_present=present)

    @property
    def has_whole_replicas(self) -> bool:
        """True when every rank is a replica that holds everything, and there are several, present or not."""
        return self.replicas.size == self.everyone.size and (self.everyone.size > 1 or self.has_absent)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The torch group of an axis (``dp``, ``tp``, ...) or of ``replicas``; None where one rank is alone on it."""
        return self.groups.get(name)

    @property
    def echo_seconds(self) -> float:
        """What channels of a rehearsal have spent in place of peers so far; nothing in a run."""
        channels = (*self.channels.values(), self.replicas, self.everyone)
        transports = {id(channel.transport): channel.transport for channel in channels}
        return sum(one.seconds for one in transports.values() if isinstance(one, EchoTransport))

    def close(self) -> None:
        """Give back shared memory and the groups made for this mesh; closing twice is allowed. Nothing works afterwards."""
        for channel in (*self.channels.values(), self.replicas, self.everyone, *self._background):
            # The thread first: it may be using the rest. Memory that one still uses goes when it ends, or with the process.
            if isinstance(channel.transport, ThreadedTransport) and not channel.transport.close():
                continue
            if isinstance(inner := inner_transport(channel), (SharedTransport, TwoLevelTransport)):
                inner.close()
        # A process that proves many plans makes many meshes, and each of gloo's groups has threads of its own.
        for group in self._own_groups:
            dist.destroy_process_group(group)
        self._own_groups = []

    def add_background(self, world: World, axis: Axis) -> Channel:
        """A second channel along an axis, for exchanges that go on while the others are used. Every rank calls it.

        It has a group and a memory of its own, so that a message of it can never be taken for one of a step, and a traffic
        counter of its own, because one thread counts at a time. Closing the mesh closes it.
        """
        own = self.channels[axis]
        found = (
            Channel(own.axis, rank=own.rank, size=own.size, transport=None, traffic=TrafficCounter())
            if own.size == 1
            else None
        )
        for ranks in rank_groups(self.degrees, (axis,)) if found is None else ():
            group = _new_group(world, ranks)
            if world.rank in ranks:
                assert group is not None
                self._own_groups.append(group)
                # It waits most of the time, and spinning would take the processor from the thread that computes.
                transport = _build_transport(world, group, axis=f"{axis.value} (background)", shared=True, spins=False)
                found = Channel(own.axis, rank=own.rank, size=own.size, transport=transport, traffic=TrafficCounter())
        assert found is not None, "every rank lies on every axis"
        self._background.append(found)
        return found


def build_mesh(world: World, plan: Plan, *, shared: bool = True) -> Mesh:
    """The mesh of a run. Every rank calls it, because making a group is collective.

    Args:
        world: the processes.
        plan: how many lie along each axis.
        shared: move bytes through shared memory where all ranks of an axis are on this machine and the tensors are the
            CPU's; False keeps to torch's groups.
    """
    degrees = {axis: plan.degree(axis) for axis in GRID}
    assert math.prod(degrees.values()) == world.size, "plan.check() comes first"
    groups: dict[str, dist.ProcessGroup] = {}
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    names: dict[tuple[int, ...], list[str]] = {}
    for name, axes in _named_axes(degrees):
        for ranks in rank_groups(degrees, axes):
            # All ranks make all groups, in the same order: torch demands it. Two names for the same ranks share one.
            key = tuple(ranks)
            if key not in made:
                made[key] = _make_group(world, ranks)
            group = made[key]
            if group is not None and world.rank in ranks:
                groups[name] = group
                names.setdefault(key, []).append(name)
    hosts = find_hosts(world) if shared and world.device.type == "cpu" else (0,) * world.size
    between = _make_groups_between(world, made, hosts)
    transports: dict[str, Transport] = {}
    for key, shared_by in names.items():
        axis = "/".join(shared_by)
        if key in between:
            transport: Transport = _build_between(world, between[key], axis=axis)
        else:
            transport = _build_transport(world, groups[shared_by[0]], axis=axis, shared=shared)
        transports.update(dict.fromkeys(names[key], transport))
    mesh = _mesh(world.rank, degrees, TrafficCounter(), groups, transports, num_logical=world.num_logical)
    mesh.follows_present = world.num_planned > 0
    mesh._own_groups = [group for group in made.values() if group is not None and group is not world.group]
    for pair in between.values():
        mesh._own_groups += [group for group in pair if group is not None]
    mesh.warnings = warn_of_crossings({axis: rank_groups(degrees, (axis,)) for axis in INSIDE}, degrees, hosts)
    return mesh


def inner_transport(channel: Channel) -> Transport | None:
    """What moves the bytes of a channel, whether or not in the background."""
    return channel.transport.inner if isinstance(channel.transport, ThreadedTransport) else channel.transport


_Between = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


def _make_groups_between(
    world: World, made: Mapping[tuple[int, ...], object], hosts: Sequence[int]
) -> dict[tuple[int, ...], _Between]:
    """For each group of this rank that spans hosts, two more: between all its ranks, and between those of this host, where it
    has two levels. DDP uses the mesh's own groups on its own account, and a thread must not get between its messages."""
    found: dict[tuple[int, ...], _Between] = {}
    for ranks in made:
        pieces = ranks_by_host(ranks, hosts)
        if len(pieces) == 1:
            continue
        whole, near = _new_group(world, list(ranks)), None
        for piece in pieces if has_two_levels(ranks, hosts) else ():
            group = _new_group(world, piece)
            near = group if world.rank in piece else near
        if world.rank in ranks:
            found[ranks] = (whole, near)
    return found


def _build_between(world: World, groups: _Between, *, axis: str) -> Transport:
    """A transport between hosts: over two levels where all hosts can, and in the background."""
    whole, near = groups
    assert whole is not None
    ranks = dist.get_process_group_ranks(whole)
    ring = [ranks.index(rank) for piece in ranks_by_host(ranks, find_hosts(world)) for rank in piece]
    inner: Transport = TorchTransport(whole, ring=ring)
    if near is not None:
        # It waits for the other host most of the time, and spinning would take the processor from what computes.
        local = build_shared_transport(near, axis=axis, deadline_seconds=world.deadline_seconds, spins=False)
        vote = torch.tensor([0 if local is None else 1])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=whole)
        if vote.item():
            assert local is not None
            inner = TwoLevelTransport(local, whole)
        elif local is not None:
            local.close()
    return ThreadedTransport(inner, name=axis, deadline_seconds=world.deadline_seconds)


def _build_transport(
    world: World, group: dist.ProcessGroup, *, axis: str, shared: bool, spins: bool = True
) -> Transport:
    if world.is_rehearsed:
        return EchoTransport()
    is_cpu = world.device.type == "cpu"
    if shared and is_cpu and len({find_hosts(world)[rank] for rank in dist.get_process_group_ranks(group)}) == 1:
        # Ranks that outnumber the cores must not burn the time that the peer they wait for needs.
        spins = spins and world.size <= _num_cores()
        transport = build_shared_transport(group, axis=axis, deadline_seconds=world.deadline_seconds, spins=spins)
        if transport is not None:
            return transport
    return TorchTransport(group, is_ordered=is_cpu)


def _num_cores() -> int:
    # The cores that this process may use; only Linux says.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pretend_mesh(plan: Plan, rank: int = 0) -> Mesh:
    """The mesh of one rank of a plan without any other process: for shapes and sizes on meta tensors."""
    degrees = {axis: plan.degree(axis) for axis in GRID}
    names = [name for name, _ in _named_axes(degrees)]
    return _mesh(rank, degrees, TrafficCounter(), {}, {name: SilentTransport() for name in names})


def rank_groups(degrees: Mapping[Axis, int], axes: Sequence[Axis]) -> list[list[int]]:
    """The groups of ranks that differ along ``axes`` only, in the order of their first ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(degrees[axis]) for axis in GRID))):
        fixed = tuple(number for axis, number in zip(GRID, place, strict=True) if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


def _named_axes(degrees: Mapping[Axis, int]) -> list[tuple[str, tuple[Axis, ...]]]:
    named: list[tuple[str, tuple[Axis, ...]]] = [(axis.value, (axis,)) for axis in GRID]
    named += [("replicas", (Axis.DATA, Axis.CONTEXT)), ("everyone", INSIDE)]
    return [(name, axes) for name, axes in named if math.prod(degrees[axis] for axis in axes) > 1]


def _make_group(world: World, ranks: list[int]) -> dist.ProcessGroup | None:
    return world.group if len(ranks) == world.size else _new_group(world, ranks)


def _new_group(world: World, ranks: list[int]) -> dist.ProcessGroup | None:
    # Without a timeout of its own a group gets torch's half an hour, not the timeout of the world.
    timeout = timedelta(seconds=world.join_seconds)
    with noted_connections(), sealed_listeners(), abortable_connecting():
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=False)
    if not isinstance(group, dist.ProcessGroup):
        return None
    wait_longer(world, group)
    return group


def _mesh(
    rank: int,
    degrees: Mapping[Axis, int],
    traffic: TrafficCounter,
    groups: Mapping[str, dist.ProcessGroup],
    transports: Mapping[str, Transport],
    *,
    num_logical: int = 0,
) -> Mesh:
    places = list(itertools.product(*(range(degrees[axis]) for axis in GRID)))
    coordinates = dict(zip(GRID, places[rank], strict=True))

    def channel(name: str, axes: Sequence[Axis]) -> Channel:
        ranks = next(ranks for ranks in rank_groups(degrees, axes) if rank in ranks)
        transport = transports.get(name)
        background = transport if isinstance(transport, ThreadedTransport) else None
        place = ranks.index(rank)
        return Channel(name, rank=place, size=len(ranks), transport=transport, traffic=traffic, background=background)

    return Mesh(
        degrees=degrees,
        coordinates=coordinates,
        channels={axis: channel(axis.value, (axis,)) for axis in GRID},
        replicas=channel("replicas", (Axis.DATA, Axis.CONTEXT)),
        everyone=channel("everyone", INSIDE),
        traffic=traffic,
        groups=groups,
        num_logical=num_logical,
    )
