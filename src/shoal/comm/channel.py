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
        """See ``Transport``. One reduction to each owner: gloo's reduce-scatter is an all-reduce, and wants equal counts."""
        parts = torch.split(whole, list(counts))
        for root, part in enumerate(parts):
            if part.numel():
                dist.reduce(part, self.ranks[root], group=self.group)
        if own.data_ptr() != parts[self.rank].data_ptr():
            own.copy_(parts[self.rank])

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``. One broadcast from each owner, because gloo wants equal counts."""
        parts = torch.split(whole, list(counts))
        if own.numel() and own.data_ptr() != parts[self.rank].data_ptr():
            parts[self.rank].copy_(own)
        for root, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, self.ranks[root], group=self.group)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See ``Transport``."""
        work = []
        for peer, (outgoing, incoming) in enumerate(zip(sent, received, strict=True)):
            if peer == self.rank:
                incoming.copy_(outgoing)
                continue
            if outgoing.numel():
                work.append(dist.P2POp(dist.isend, outgoing, self.ranks[peer], self.group))
            if incoming.numel():
                work.append(dist.P2POp(dist.irecv, incoming, self.ranks[peer], self.group))
        for handle in dist.batch_isend_irecv(work) if work else []:
            handle.wait()

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """See ``Transport``."""
        size = len(self.ranks)
        work = [
            dist.P2POp(dist.isend, sent, self.ranks[(self.rank + by) % size], self.group),
            dist.P2POp(dist.irecv, received, self.ranks[(self.rank - by) % size], self.group),
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
