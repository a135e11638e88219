"""The collectives that techniques are written in: one channel per axis of the mesh.

A channel checks the arguments and counts the traffic; a transport moves the bytes. Where every rank of an axis is on this
machine that is shared memory (``shared.py``), which adds in the order of ranks and is several times faster than gloo;
everywhere else it is a torch process group. Counts may differ from rank to rank, which torch's own reduce-scatter and
all-gather refuse.

The counted bytes are those of the whole tensor for reductions and all_gather, and of what was sent for the others.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.trafficcounter import TrafficCounter
from shoal.core.errors import RunError


class PeerLost(RunError):
    """Another rank died or did not come; the error says which, in what operation, and how long it was waited for."""

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        """The ranks of the run that were lost."""


CHUNK_ELEMENTS = 1 << 20
"""Elements of a slice that travel together in a reduction between hosts: what one chunk takes to add, the next takes to come."""

_is_silent = False
"""Of this process, in which one thread computes. Not a ``ContextVar``, which a compiled model cannot read."""


@contextmanager
def silent() -> Iterator[None]:
    """Inside, nothing crosses and nothing is counted on any channel: every operation does as if all ranks had what this one has.

    For code that runs on one rank for its shapes, such as a unit of another pipeline stage.
    """
    global _is_silent
    before, _is_silent = _is_silent, True
    try:
        yield
    finally:
        _is_silent = before


def is_silent() -> bool:
    """True inside ``silent()``."""
    return _is_silent


class Transport(Protocol):
    """Moves the bytes of one group of ranks. Every tensor is contiguous; every call is collective and in the same order."""

    def all_reduce_(self, tensor: Tensor) -> None:
        """Add over ranks, in place."""

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """The largest over ranks, elementwise, in place."""

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """Add the flat ``whole`` over ranks and put this rank's slice of it into ``own``; ``whole`` is left undefined."""

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """Put every rank's flat ``own`` one after another into ``whole``."""

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Give ``sent[r]`` to rank r, and get ``received[r]`` from it."""

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """Give ``sent`` to the rank ``by`` places on, around the ring, and get ``received`` from ``by`` places back."""

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Everyone gets the tensor of rank ``source`` of this group."""


class Channel:
    """One axis of the mesh, seen from this rank. With one rank on it every operation is the identity and costs nothing."""

    def __init__(
        self, axis: str, *, rank: int, size: int, transport: Transport | None, traffic: TrafficCounter
    ) -> None:
        assert size == 1 or transport is not None
        self.axis = axis
        self.rank = rank
        self.size = size
        self.transport = transport
        self.traffic = traffic

    @property
    def is_counting(self) -> bool:
        """True while what crosses now will be counted."""
        return self.traffic.is_open and not is_silent()

    def __deepcopy__(self, memo: object) -> "Channel":
        # A copy of a model talks to the same ranks.
        return self

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Add over ranks, in place; the tensor must be contiguous."""
        if self.transport is not None and tensor.numel() and not is_silent():
            self.traffic.note(self.axis, "all_reduce", tensor.nbytes)
            self.transport.all_reduce_(tensor)
        return tensor

    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        """The largest over ranks, elementwise, in place; the tensor must be contiguous."""
        if self.transport is not None and tensor.numel() and not is_silent():
            self.traffic.note(self.axis, "all_reduce_max", tensor.nbytes)
            self.transport.all_reduce_max_(tensor)
        return tensor

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Add the flat ``whole`` over ranks and put this rank's slice into ``own``; ``whole`` is undefined afterwards.

        Args:
            whole: 1-D, ``sum(counts)`` elements.
            own: 1-D, ``counts[rank]`` elements; it may be that slice of ``whole`` itself.
            counts: elements of each rank's slice, in the order of ranks; some may be zero.
        """
        assert whole.numel() == sum(counts) and own.numel() == counts[self.rank]
        if self.transport is None:
            if own.data_ptr() != whole.data_ptr():
                own.copy_(whole)
        elif is_silent():
            own.copy_(torch.split(whole, list(counts))[self.rank])
        elif whole.numel():
            self.traffic.note(self.axis, "reduce_scatter", whole.nbytes)
            self.transport.reduce_scatter(whole, own, counts)
        return own

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> Tensor:
        """Put every rank's flat ``own`` one after another into ``whole``; ``own`` may be its slice of ``whole`` itself."""
        assert whole.numel() == sum(counts) and own.numel() == counts[self.rank]
        if self.transport is None:
            if own.data_ptr() != whole.data_ptr():
                whole.copy_(own)
        elif is_silent():
            for part in torch.split(whole, list(counts)):
                _pretend(own, part)
        elif whole.numel():
            self.traffic.note(self.axis, "all_gather", whole.nbytes)
            self.transport.all_gather(own, whole, counts)
        return whole

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Give ``sent[r]`` to rank r and get ``received[r]`` from it (all-to-all); shapes may differ."""
        if self.transport is None:
            received[0].copy_(sent[0])
            return
        if is_silent():
            for outgoing, incoming in zip(sent, received, strict=True):
                _pretend(outgoing, incoming)
            return
        self.traffic.note(self.axis, "all_to_all", sum(part.nbytes for part in sent))
        self.transport.all_to_all(sent, received)

    def ring_shift(self, sent: Tensor, received: Tensor, *, by: int = 1) -> None:
        """Give ``sent`` to the rank ``by`` places on around the ring, and get ``received`` from ``by`` places back."""
        if self.transport is None or is_silent():
            received.copy_(sent)
            return
        self.traffic.note(self.axis, "ring_shift", sent.nbytes)
        self.transport.ring_shift(sent, received, by)

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Everyone gets the tensor of rank ``source`` of this channel."""
        if self.transport is not None and tensor.numel() and not is_silent():
            self.traffic.note(self.axis, "broadcast", tensor.nbytes)
            self.transport.broadcast_(tensor, source)
        return tensor


def _pretend(own: Tensor, received: Tensor) -> None:
    """Receive from a rank that has what this one has; a part of another size is filled with the first of it."""
    if own.shape == received.shape:
        received.copy_(own)
    elif own.numel():
        received.copy_(own.reshape(-1)[0])
    else:
        received.zero_()


class TorchTransport:
    """A torch process group: gloo on the CPU, nccl on CUDA."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)

    def all_reduce_(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        dist.all_reduce(tensor, group=self.group)

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. On the CPU every rank gets its slice from all others at once and adds in the order of ranks.

        gloo's reduce-scatter is an all-reduce and wants equal counts. What has come is added while the next chunk is on its way.
        """
        if whole.is_cuda:
            self._reduce_scatter_padded(whole, own, counts)
            return
        parts = torch.split(whole, list(counts))
        mine = parts[self.rank]
        chunks = [slice(start, start + CHUNK_ELEMENTS) for start in range(0, max(counts), CHUNK_ELEMENTS)]
        under_way = [self._post_slices(parts, mine, chunk) for chunk in chunks[:1]]
        for number, chunk in enumerate(chunks):
            if number + 1 < len(chunks):
                under_way.append(self._post_slices(parts, mine, chunks[number + 1]))
            handles, received = under_way.pop(0)
            for handle in handles:
                handle.wait()
            if mine[chunk].numel():
                total = received[0].clone() if self.rank == 0 else received[0]
                for part in received[1:]:
                    total.add_(part)
                own[chunk].copy_(total)

    def _post_slices(self, parts: Sequence[Tensor], mine: Tensor, chunk: slice) -> tuple[list[dist.Work], list[Tensor]]:
        """Start to send a chunk of every other rank's slice and to receive this rank's from them, in the order of ranks."""
        here = mine[chunk]
        received = [here if peer == self.rank else torch.empty_like(here) for peer in range(len(self.ranks))]
        return self._post([part[chunk] for part in parts], received), received

    def _reduce_scatter_padded(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """nccl has it in one call, for equal counts: shorter slices end in zeros."""
        most = max(counts)
        padded = whole.new_zeros(len(counts), most)
        for row, part in zip(padded, torch.split(whole, list(counts)), strict=True):
            row[: part.numel()].copy_(part)
        total = whole.new_empty(most)
        dist.reduce_scatter_tensor(total, padded.view(-1), group=self.group)
        own.copy_(total[: own.numel()])

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. On the CPU every rank sends its slice to all others at once, because gloo wants equal counts."""
        parts = torch.split(whole, list(counts))
        if whole.is_cuda:
            most = max(counts)
            sent = own.new_zeros(most)
            sent[: own.numel()].copy_(own)
            gathered = whole.new_empty(len(counts), most)
            dist.all_gather_into_tensor(gathered.view(-1), sent, group=self.group)
            for row, part in zip(gathered, parts, strict=True):
                part.copy_(row[: part.numel()])
            return
        mine = parts[self.rank]
        if own.numel() and own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        for handle in self._post([mine] * len(parts), parts):
            handle.wait()

    def _post(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
        """Give ``sent[r]`` to rank r and start to get ``received[r]`` from it, for all other ranks.

        Receives come first: gloo was measured to send in one direction at a time where both ends had posted their send before
        their receive, which takes twice as long. Sends go round: at any time every rank sends to another one.
        """
        size = len(self.ranks)
        if any(one.is_cuda for one in (*sent, *received)):
            return self._post_batch(sent, received)
        work: list[dist.Work] = []
        for by in range(1, size):
            peer = (self.rank - by) % size
            if received[peer].numel():
                receiving = dist.irecv(received[peer], self.ranks[peer], group=self.group)
                assert receiving is not None, "None is for ranks outside of the group"
                work.append(receiving)
        for by in range(1, size):
            peer = (self.rank + by) % size
            if sent[peer].numel():
                sending = dist.isend(sent[peer], self.ranks[peer], group=self.group)
                assert sending is not None
                sending.wait()
        return work

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See ``Transport``."""
        received[self.rank].copy_(sent[self.rank])
        for handle in self._post(sent, received):
            handle.wait()

    def _post_batch(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
        """The same in one call: nccl must be told of all sends and receives at once, or ranks wait for each other."""
        others = [(number, rank) for number, rank in enumerate(self.ranks) if number != self.rank]
        work = [dist.P2POp(dist.irecv, received[n], rank, self.group) for n, rank in others if received[n].numel()]
        work += [dist.P2POp(dist.isend, sent[n], rank, self.group) for n, rank in others if sent[n].numel()]
        return dist.batch_isend_irecv(work) if work else []

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """See ``Transport``."""
        size = len(self.ranks)
        work = [
            dist.P2POp(dist.irecv, received, self.ranks[(self.rank - by) % size], self.group),
            dist.P2POp(dist.isend, sent, self.ranks[(self.rank + by) % size], self.group),
        ]
        for handle in dist.batch_isend_irecv(work):
            handle.wait()

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """See ``Transport``."""
        dist.broadcast(tensor, self.ranks[source], group=self.group)


class EchoTransport:
    """No peers: every operation does as if all ranks had what this one has, so that numbers stay finite. For rehearsals."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Spent in here so far: what a rank with peers does not compute, but waits for."""

    def all_reduce_(self, tensor: Tensor) -> None:
        """See ``Transport``. The sum of equal shares would grow from step to step; one of them is left."""

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """See ``Transport``."""

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. Whose slice it is cannot be told from here; that of the first of its size will do."""
        with self._timed():
            first = next(part for part in torch.split(whole, list(counts)) if part.numel() == own.numel())
            if own.numel() and own.data_ptr() != first.data_ptr() and not _overlap(own, whole):
                own.copy_(first)

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``."""
        with self._timed():
            kept = own.clone() if _overlap(own, whole) else own
            for part in torch.split(whole, list(counts)):
                _pretend(kept, part)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See ``Transport``."""
        with self._timed():
            for outgoing, incoming in zip(sent, received, strict=True):
                _pretend(outgoing, incoming)

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """See ``Transport``."""
        with self._timed():
            received.copy_(sent)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """See ``Transport``."""

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


def _overlap(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


class SilentTransport:
    """Nothing moves: for tracing one rank of a plan on meta tensors, where only shapes matter."""

    def all_reduce_(self, tensor: Tensor) -> None:
        """See ``Transport``."""

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """See ``Transport``."""

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``."""

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``."""

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See ``Transport``."""

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """See ``Transport``."""

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """See ``Transport``."""
