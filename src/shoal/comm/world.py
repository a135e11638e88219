"""A process's place among the others: who it is, whom it can reach, and how long it will wait for them.

The same worker runs under Shoal's supervisor, torchrun, SLURM, MPI and others (``launch/environments.py``).
Under the supervisor the ranks meet in a file that only this user can open (``launch/ranks.py``): torch's ``TCPStore`` asks
nobody who he is, and every user of the machine could read, change and fill it. What gloo listens on is sealed as soon as a group
is connected (``packetfilter.py``).
"""

import contextlib
import itertools
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore  # torch types these names only there
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from shoal.comm.interruption import is_interruptible
from shoal.comm.leaving.connecting import abortable_connecting
from shoal.comm.leaving.connections import noted_connections
from shoal.comm.network.interface import VARIABLE, address_of, choose_interface, own_address
from shoal.comm.network.ways import check_ways, spans_hosts
from shoal.comm.packetfilter import drop_everybody, sealed_listeners
from shoal.comm.store.agentstore import AgentStore
from shoal.core.errors import RunError
from shoal.core.place import Place

_JOINED = itertools.count()
_OPENED: list[Store] = []
"""The store of this process's launcher, once it is open."""
_KEPT: list[Store] = []
_LISTENING: list[int] = []
"""The socket on which this process serves that store."""

_NO_WAY = ("Network is unreachable", "No route to host", "Operation not permitted", "Connection timed out")
"""What the system says where a host has no way to another one, and what no rank's death looks like."""


class World:
    """The processes of a run. A process that nobody launched has no group, and every operation here is then the identity."""

    def __init__(self, place: Place, *, device: torch.device, deadline_seconds: float) -> None:
        self.rank = place.rank
        self.size = place.world_size
        self.local_rank = place.local_rank
        """Its number among those of its host."""
        self.generation = place.generation
        self.device = device
        self.deadline_seconds = deadline_seconds
        self.join_seconds = deadline_seconds
        """How long the ranks of a group may take to connect to one another."""
        self.group: dist.ProcessGroup | None = None
        self.save_group: dist.ProcessGroup | None = None
        self.owns_group = True
        self.num_logical = 0
        """Replicas that the run's plan has, where fewer are present (``core/logical.py``); 0 where all are."""
        self.num_planned = 0
        """Replicas that the run's plan has, where the batch grows and shrinks with those that are present; 0 where it is held."""
        self.is_rehearsed = False
        """There are no other processes: see ``comm/rehearsal.py``."""
        self.hosts: tuple[int, ...] | None = None
        """The host of every rank; found by the first mesh where nobody has said it (``comm/hosts.py``)."""

    @property
    def planned_replicas(self) -> int:
        """Replicas that the plan has, where others may be present; 0 where all are."""
        return self.num_logical or self.num_planned

    @property
    def is_first(self) -> bool:
        """True on the rank that prints and writes what is written once."""
        return self.rank == 0

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a small tensor over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in the order of ranks; all have the same shape."""
        if self.group is None:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_reduce_(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Leave the group."""
        if self.group is not None and self.owns_group:
            dist.destroy_process_group()
        self.group = self.save_group = None


def join_world(
    place: Place,
    *,
    deadline_seconds: float,
    store: Store | None = None,
    device: torch.device | None = None,
    join_seconds: float | None = None,
) -> World:
    """Join the other processes of this run, or be alone.

    Args:
        place: what the launcher told this process (``launch/environments.py`` reads it).
        deadline_seconds: how long a collective waits before it gives up.
        store: where the processes meet; the place's file or the launcher's own when left out.
        device: where tensors are; left out, this process's GPU where there is one.
        join_seconds: how long ranks may take to connect to one another; left out, as long as a collective.
    """
    if device is None:
        device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    world = World(place, device=device, deadline_seconds=deadline_seconds)
    world.join_seconds = deadline_seconds if join_seconds is None else min(join_seconds, deadline_seconds)
    if not place.is_launched:
        return world
    timeout = timedelta(seconds=world.join_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        # The caller's own group: use it, and leave it to him.
        world.group, world.owns_group = dist.group.WORLD, False
        with noted_connections(), sealed_listeners():
            world.save_group = dist.new_group(backend="gloo", timeout=timeout)
        return world
    if not place.store:
        choose_interface(place)
    if store is None and place.store and Path(place.store).is_socket():
        store = AgentStore(place.store)
        # A store that is written in Python lives only as long as Python refers to it.
        _KEPT.append(store)
    elif store is None and place.store:
        store = FileStore(place.store, place.world_size)
    elif store is None:
        # A prefix for every time that this process joins: a second group must not find the addresses of the first.
        store = PrefixStore(f"join-{next(_JOINED)}", open_store(place, timeout))
    store.set_timeout(timeout)
    # Ranks that are assembled anew have their own way to find out whom they do not reach.
    if spans_hosts(place) and not is_interruptible():
        check_ways(place, store, address_of(os.environ.get(VARIABLE, "")))
    try:
        with noted_connections(), sealed_listeners(), abortable_connecting():
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
            world.group = dist.group.WORLD
            # Saving happens on a thread of its own; two threads that used one group would mix up their collectives.
            world.save_group = dist.new_group(backend="gloo", timeout=timeout)
    except BaseException as error:
        _forget_groups()
        if not _is_no_way(error):
            raise
        raise RunError(
            f"rank {place.rank} on host {socket.gethostname()} cannot reach the other ranks: {_first_line(error)}; see that "
            "all hosts reach each other over the interface that gloo uses "
            f"({os.environ.get(VARIABLE) or 'its own choice'}): `shoal doctor --hosts` tries every pair"
        ) from error
    for group in (world.group, world.save_group):
        wait_longer(world, group)
    return world


def _is_no_way(error: BaseException) -> bool:
    # A rank whose group is assembled anew tries again, and others find out whom it could not reach.
    if is_interruptible() or not isinstance(error, RuntimeError):
        return False
    return any(words in str(error) for words in _NO_WAY)


def _forget_groups() -> None:
    """Leave nothing of a group that did not come about. torch counts the groups that it began to make, and ranks meet under that
    number: one whose count is ahead of the others' would never meet them again."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    _world.group_count = 0


def wait_longer(world: World, group: dist.ProcessGroup | None) -> None:
    """A group's ranks are connected: its collectives may take their whole deadline from now on."""
    if world.join_seconds < world.deadline_seconds and isinstance(group, dist.ProcessGroup):
        _set_pg_timeout(timedelta(seconds=world.deadline_seconds), group)


def open_store(place: Place, timeout: timedelta) -> Store:
    """Where the processes of a launcher meet; one for all the life of a process, because rank 0 may be the one that serves it.

    Args:
        place: of this process.
        timeout: how long whoever asks it for something waits.

    Raises:
        RunError: rank 0 cannot listen at its address, or cannot be reached there.
    """
    store = _opened_store(place, timeout) if not _OPENED else _OPENED[0]
    _OPENED[:] = [store]
    store.set_timeout(timeout)
    return store


def _opened_store(place: Place, timeout: timedelta) -> Store:
    """torchrun has a store of its own. Elsewhere rank 0 serves one at the place's address, and listens there only: torch would
    listen on every interface."""
    if _has_agent_store(place):
        # Not torch's own way to it: that has a prefix by the restarts of this host's agent, which other hosts count otherwise.
        return connect_store(place, timeout)
    where = f"{place.address}:{place.port}"
    try:
        own = own_address(place) or place.address
        listener = _listen(own, place) if place.rank == 0 else None
        if listener is not None:
            _LISTENING[:] = [os.dup(listener.fileno())]
        return TCPStore(
            own if place.rank == 0 else place.address,
            place.port,
            place.world_size,
            is_master=place.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        doing = "rank 0 cannot listen" if place.rank == 0 else f"rank {place.rank} cannot reach rank 0"
        raise RunError(
            f"{doing} at {where}, where {place.launcher} has its processes meet: {_first_line(error)}; set MASTER_ADDR and "
            "MASTER_PORT to an address of rank 0's host and a free port"
        ) from error


def connect_store(place: Place, timeout: timedelta) -> Store:
    """A connection of its own to the store of a launcher that serves one at the place's address."""
    where = (own_address(place) if place.rank == 0 and not _has_agent_store(place) else None) or place.address
    return TCPStore(where, place.port, place.world_size, is_master=False, timeout=timeout, wait_for_workers=False)


def seal_store() -> None:
    """Let nobody connect any more to the store that this process serves, if it does: all ranks are connected by now.

    torch's store asks nobody who he is: whoever reaches its port can read, change and delete every key. A kernel without such
    filters leaves it open.
    """
    while _LISTENING:
        descriptor = _LISTENING.pop()
        with contextlib.suppress(OSError):
            drop_everybody(descriptor)
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    """Without the C++ stack that torch puts below."""
    return str(error).partition("\n")[0].strip() or type(error).__name__


def _has_agent_store(place: Place) -> bool:
    return place.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listen(where: str, place: Place) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(where, place.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(place.world_size + 16)
    except OSError:
        listener.close()
        raise
    return listener
