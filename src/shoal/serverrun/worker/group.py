"""A worker that is a group of ranks: how they meet, the group leader, and scatter and collect.

Weights go out to the ranks, and their gradients back: whole on the leader, on every rank the part that it holds.

Placements say which boxes of a whole tensor a rank holds. At the start every rank tells the leader its own; from then on a
message is those boxes, one after the other, and nothing else. Of a gradient that several ranks hold alike, one of them speaks.

    leader's row     | a a a a | b b b b b b |                   whole tensors, as servers hold them
    to rank 1        | a a | b b b b b b |                       its boxes of a, and b whole
    from rank 1      | a a |                                     b is the leader's to speak for
"""

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore  # torch types this name only there

from shoal.comm.channel import Channel
from shoal.comm.full_tensor import box, is_spokesman
from shoal.comm.world import World, join_world
from shoal.core.errors import RunError
from shoal.core.place import Place
from shoal.core.placement import Patch, Placement
from shoal.engine.model import ParallelModel
from shoal.paramserver.epochs import EpochSpan
from shoal.paramserver.worker.flat import FlatParameters
from shoal.serverrun.process import ProcessSpec
from shoal.serverrun.worker.shares import ShareResult, ShareRunner
from shoal.serverrun.worker.worktimes import WorkTimes

LEADER = 0
"""The rank of a group that is the worker to everyone else."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank of a group holds of the trained parameters, by name in the order of names."""

    placements: Mapping[str, Placement]
    spoken: frozenset[str]
    """Those whose gradient it brings."""

    @classmethod
    def of(cls, model: ParallelModel) -> "Holding":
        """What this rank holds."""
        placements = dict(sorted(model.reduction.placements.items()))
        spoken = [
            name
            for name in placements
            if is_spokesman(model.mesh, is_split=name in model.layout.placements, is_sharded=False)
            and model.is_first_owner(name)
        ]
        return cls(placements=placements, spoken=frozenset(spoken))

    def encode(self) -> Tensor:
        """As bytes."""
        entries = [
            [
                name,
                name in self.spoken,
                where.whole_shape,
                where.local_shape,
                [[patch.local_start, patch.whole_start, patch.shape] for patch in where.patches],
            ]
            for name, where in self.placements.items()
        ]
        return torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)

    @classmethod
    def decode(cls, encoded: Tensor) -> "Holding":
        """Back from ``encode``."""
        entries = json.loads(encoded.numpy().tobytes())
        placements = {
            name: Placement(
                whole_shape=tuple(whole),
                local_shape=tuple(local),
                patches=tuple(
                    Patch(local_start=tuple(start), whole_start=tuple(at), shape=tuple(shape))
                    for start, at, shape in patches
                ),
            )
            for name, _, whole, local, patches in entries
        }
        return cls(placements=placements, spoken=frozenset(name for name, speaks, *_ in entries if speaks))


class ScatterCollect:
    """One rank's part in it. Every method is called by all ranks of the group together.

    Args:
        model: this rank's model.
        dtype: of the trained parameters; a rank of a pipeline may hold none.
        row: whole weights and gradients; on the leader, None elsewhere.
    """

    def __init__(self, model: ParallelModel, dtype: torch.dtype, row: FlatParameters | None) -> None:
        self._channel = model.mesh.everyone
        self._parameters = model.reduction.updated
        self._own = Holding.of(model)
        self._dtype = dtype
        holdings = _tell(self._channel, self._own)
        self._weights = row.whole(row.weights) if row is not None else {}
        self._gradient = row.whole(row.gradient) if row is not None else {}
        if row is not None:
            _check(holdings, {name: spec.shape for name, spec in row.model.items()})
        self._others = [
            holding if row is not None and rank != self._channel.rank else None for rank, holding in enumerate(holdings)
        ]
        """Of the other ranks, on the leader."""
        is_follower = row is None
        self._to = [self._room(holding, of_spoken=False) for holding in self._others]
        self._from = [self._room(holding, of_spoken=True) for holding in self._others]
        self._received = self._room(self._own if is_follower else None, of_spoken=False)
        self._sent = self._room(self._own if is_follower else None, of_spoken=True)

    @torch.no_grad()
    def scatter(self) -> None:
        """Bring the weights of the leader's row into every rank's parameters."""
        nothing = self._room(None, of_spoken=False)
        if self._channel.rank == LEADER:
            for holding, message in zip(self._others, self._to, strict=True):
                if holding is not None:
                    for name, patch, place in _spans(holding.placements):
                        whole = self._weights[name][box(patch.whole_start, patch.shape)]
                        message[place].view(patch.shape).copy_(whole)
            self._channel.all_to_all(self._to, [nothing] * self._channel.size)
            for name, patch, _ in _spans(self._own.placements):
                local = self._parameters[name][box(patch.local_start, patch.shape)]
                local.copy_(self._weights[name][box(patch.whole_start, patch.shape)])
            return
        self._channel.all_to_all([nothing] * self._channel.size, self._from_leader(self._received, nothing))
        for name, patch, place in _spans(self._own.placements):
            local = self._parameters[name][box(patch.local_start, patch.shape)]
            local.copy_(self._received[place].view(patch.shape))

    @torch.no_grad()
    def collect(self) -> None:
        """Bring every rank's gradients into the leader's row; what no sample touched is zero."""
        nothing = self._room(None, of_spoken=False)
        if self._channel.rank == LEADER:
            self._channel.all_to_all([nothing] * self._channel.size, self._from)
            for name, patch, _ in _spans(_spoken(self._own)):
                self._put(name, patch, self._gradient[name][box(patch.whole_start, patch.shape)])
            for holding, message in zip(self._others, self._from, strict=True):
                if holding is not None:
                    for name, patch, place in _spans(_spoken(holding)):
                        whole = self._gradient[name][box(patch.whole_start, patch.shape)]
                        whole.copy_(message[place].view(patch.shape))
            return
        for name, patch, place in _spans(_spoken(self._own)):
            self._put(name, patch, self._sent[place].view(patch.shape))
        self._channel.all_to_all(self._from_leader(self._sent, nothing), [nothing] * self._channel.size)

    def _put(self, name: str, patch: Patch, where: Tensor) -> None:
        grad = self._parameters[name].grad
        if grad is None:
            where.zero_()
        else:
            where.copy_(grad[box(patch.local_start, patch.shape)])

    def _from_leader(self, message: Tensor, nothing: Tensor) -> list[Tensor]:
        """One message with the leader, and none with the others."""
        return [message if rank == LEADER else nothing for rank in range(self._channel.size)]

    def _room(self, holding: Holding | None, *, of_spoken: bool) -> Tensor:
        if holding is None:
            return torch.empty(0, dtype=self._dtype)
        placements = _spoken(holding) if of_spoken else holding.placements
        return torch.empty(sum(math.prod(patch.shape) for _, patch, _ in _spans(placements)), dtype=self._dtype)


def _spoken(holding: Holding) -> dict[str, Placement]:
    return {name: where for name, where in holding.placements.items() if name in holding.spoken}


def _spans(placements: Mapping[str, Placement]) -> Iterator[tuple[str, Patch, slice]]:
    """Every box of some tensors, and where it lies in a message."""
    at = 0
    for name, placement in placements.items():
        for patch in placement.patches:
            size = math.prod(patch.shape)
            yield name, patch, slice(at, at + size)
            at += size


def _tell(channel: Channel, own: Holding) -> list[Holding]:
    """What every rank of the group holds, by rank."""
    encoded = own.encode()
    sizes = torch.zeros(channel.size, dtype=torch.int64)
    channel.all_gather(torch.tensor([encoded.numel()]), sizes, [1] * channel.size)
    counts = [int(size) for size in sizes]
    whole = channel.all_gather(encoded, torch.empty(sum(counts), dtype=torch.uint8), counts)
    return [Holding.decode(part) for part in torch.split(whole, counts)]


def _check(holdings: Sequence[Holding], model: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a group that would leave a part of a gradient behind, or bring one twice.

    Raises:
        RunError: names the parameter.
    """
    brought = dict.fromkeys(model, 0)
    for holding in holdings:
        for name, patch, _ in _spans(_spoken(holding)):
            brought[name] += math.prod(patch.shape)
    for name, shape in model.items():
        if brought[name] != math.prod(shape):
            raise RunError(
                f"the ranks of this worker bring {brought[name]} of the {math.prod(shape)} elements of {name!r}'s gradient"
            )


# A worker that is a group of ranks: the first takes work units, pulls and pushes; the others compute with it what it says.
#
# To the servers, the update log and the center the first rank is the worker, and it works by the same code as one that is
# alone: where that computes a work unit by itself, here a command goes to the group first, then the weights
# (``ScatterCollect``). So every update rule works with groups. While there is nothing to do the leader says so from time to
# time: a rank that hears nothing for the deadline names it and ends.

_RUN, _STRETCH, _WAIT, _END = range(4)
_COMMAND_NUMBERS = 9
"""What is to be done, up to four numbers that say which, and four of the epoch where the data grows."""
_SIGNS_PER_DEADLINE = 4

T = TypeVar("T")


class GroupLeader:
    """See the module; a ``Shares`` of the whole group.

    Args:
        shares: this rank's passes.
        dealing: weights and gradients.
        channel: all ranks of the group.
        deadline_seconds: how long the others wait for a command.
    """

    def __init__(
        self, shares: ShareRunner, scatter_collect: ScatterCollect, channel: Channel, *, deadline_seconds: float
    ) -> None:
        self._shares = shares
        self._scatter_collect = scatter_collect
        self._channel = channel
        # A command and what follows it are one thing to the group; a sign of life must not come in between.
        self._lock = threading.Lock()
        self._lost: Exception | None = None
        self._is_over = threading.Event()
        self._signs = threading.Thread(
            target=self._give_signs, args=(deadline_seconds / _SIGNS_PER_DEADLINE,), name="signs", daemon=True
        )
        self._signs.start()

    @property
    def num_samples(self) -> int:
        """Of the training split."""
        return self._shares.num_samples

    def run(
        self, step: int, share: int, *, part: int = 0, num_parts: int = 1, data: EpochSpan | None = None
    ) -> ShareResult:
        """See ``Shares``; the gradient is in the row."""
        epoch = () if data is None else (data.epoch, data.first_step, data.version, data.samples)

        def compute() -> ShareResult:
            return self._shares.run(step, share, part=part, num_parts=num_parts, data=data)

        return self._do(compute, _RUN, step, share, part, num_parts, *epoch)

    def run_span(self, step: int, start: int, stop: int) -> float:
        """See ``Shares``; the gradient is in the row."""
        return self._do(lambda: self._shares.run_span(step, start, stop), _STRETCH, step, start, stop)

    def end(self) -> None:
        """Let the others go home."""
        self._is_over.set()
        with self._lock:
            self._tell(_END)

    def _do(self, compute: Callable[[], T], *command: int) -> T:
        with self._lock:
            self._tell(*command)
            self._scatter_collect.scatter()
            found = compute()
            self._scatter_collect.collect()
            return found

    def _tell(self, *command: int) -> None:
        if self._lost is not None:
            raise self._lost
        _broadcast(self._channel, command)

    def _give_signs(self, every_seconds: float) -> None:
        while not self._is_over.wait(every_seconds):
            with self._lock:
                try:
                    if not self._is_over.is_set():
                        self._tell(_WAIT)
                except (RunError, RuntimeError) as error:
                    # Whoever works meets it at the next command. gloo raises plain RuntimeErrors.
                    self._lost = error
                    return


def follow(shares: ShareRunner, scatter_collect: ScatterCollect, channel: Channel, times: WorkTimes) -> None:
    """The life of every other rank of a group: does what the leader says, until that says that it is over.

    What it waits for a command counts as its worker's wait for a work unit, whatever the leader does meanwhile.

    Raises:
        PeerLost: a rank of the group died, or was silent for the deadline.
    """
    while True:
        with times.taking():
            what, *numbers = _broadcast(channel, ())
        if what == _END:
            times.end()
            return
        if what == _WAIT:
            continue
        step, first, second, third, epoch, first_step, version, in_epoch = numbers
        times.begin(step + 1)
        with times.computing():
            scatter_collect.scatter()
            if what == _RUN:
                data = EpochSpan(epoch=epoch, first_step=first_step, version=version, samples=in_epoch)
                found = shares.run(step, first, part=second, num_parts=third, data=data if version else None)
                samples = found.samples
            else:
                assert what == _STRETCH, f"{what} is no command"
                shares.run_span(step, first, second)
                samples = second - first
            scatter_collect.collect()
        times.computed(samples)


def _broadcast(channel: Channel, command: tuple[int, ...]) -> list[int]:
    told = torch.zeros(_COMMAND_NUMBERS, dtype=torch.int64)
    for place, number in enumerate(command):
        told[place] = number
    return [int(number) for number in channel.broadcast_(told, LEADER)]


# How the ranks of a worker meet: a worker may be a group of processes that computes one gradient by a synchronous plan.
#
# They meet in a file of the job's folder and have a torch group of their own, of which no other worker is a part. A rank that
# does not come is named; one that dies later is seen at once by the others (``comm/sharedmemory.py``), and is its worker's death.


def join_group(spec: ProcessSpec) -> World:
    """This process and the others of its worker; alone where a worker is one process.

    Raises:
        RunError: a rank of the group did not come.
    """
    size, cpu = spec.plan.ranks_per_replica, torch.device("cpu")
    deadline = spec.recipe.elastic.collective_deadline
    if size == 1:
        return World(Place(), device=cpu, deadline_seconds=deadline)
    store = FileStore(str(spec.group_store), size)
    _meet(store, spec, size, seconds=spec.recipe.elastic.start_deadline)
    place = Place(rank=spec.group_rank, world_size=size, local_rank=spec.group_rank, is_launched=True)
    return join_world(place, deadline_seconds=deadline, store=store, device=cpu)


def _meet(store: FileStore, spec: ProcessSpec, size: int, *, seconds: float) -> None:
    keys = [f"here-{rank}" for rank in range(size)]
    store.set(keys[spec.group_rank], "1")
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        worker = spec.name.partition(".")[0]
        raise RunError(
            f"rank {' and '.join(missing)} of the {size} ranks of {worker} did not come within {seconds:g} s; look at its log"
        ) from error
