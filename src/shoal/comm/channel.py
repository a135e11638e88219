"""The collectives that techniques are written in: one channel per axis of the mesh.

A channel checks the arguments and counts the traffic; a transport moves the bytes. Where every rank of an axis is on this
machine that is shared memory (``shared.py``), which adds in the order of ranks and is several times faster than gloo; between
hosts it is a torch process group (``torchgroup.py``), or both together (``twolevel.py``). Counts may differ from rank to rank,
which torch's own reduce-scatter and all-gather refuse.

The counted bytes are those of the whole tensor for reductions and all_gather, and of what was sent for the others.

Operations that begin with ``start_`` return a handle. Between hosts they go on beside what the rank computes, on a thread of the
transport (``threaded.py``); through shared memory they are over when they return, because there the processor does the moving.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
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


class Handle:
    """An operation that was started. This one is over already; a transport that goes on in the background has its own."""

    def wait(self) -> None:
        """Return when the tensors may be used again; raises what the operation raised."""

    def then(self, call: Callable[[BaseException | None], None]) -> None:
        """Call this with what the operation raised, or None, when it is over: at once, or on the thread that did it."""
        call(None)


DONE = Handle()


class Background(Protocol):
    """A transport that can do operations beside what the caller computes, one after the other in the order of their starts."""

    def start(self, operation: str, work: Callable[["Transport"], None]) -> Handle:
        """Begin ``work``, which is given the transport that moves the bytes."""


class Transport(Protocol):
    """Moves the bytes of one group of ranks. Every tensor is contiguous; every call is collective and in the same order."""

    @property
    def is_ordered(self) -> bool:
        """Sums run over ranks 0, 1, ... in this order, so that they have the bits of one process that adds in it."""

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
        self,
        axis: str,
        *,
        rank: int,
        size: int,
        transport: Transport | None,
        traffic: TrafficCounter,
        background: Background | None = None,
    ) -> None:
        """``background`` is the transport once more where it can go on beside what the rank computes."""
        assert size == 1 or transport is not None
        self.axis = axis
        self.rank = rank
        self.size = size
        self.transport = transport
        self.traffic = traffic
        self._background = background

    @property
    def overlaps(self) -> bool:
        """True where what ``start_`` operations begin goes on beside what the rank computes."""
        return self._background is not None and not is_silent()

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
            with self.traffic.call(self.axis, "all_reduce", tensor.nbytes):
                self.transport.all_reduce_(tensor)
        return tensor

    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        """The largest over ranks, elementwise, in place; the tensor must be contiguous."""
        if self.transport is not None and tensor.numel() and not is_silent():
            with self.traffic.call(self.axis, "all_reduce_max", tensor.nbytes):
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
            with self.traffic.call(self.axis, "reduce_scatter", whole.nbytes):
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
            with self.traffic.call(self.axis, "all_gather", whole.nbytes):
                self.transport.all_gather(own, whole, counts)
        return whole

    def start_all_reduce_(self, tensor: Tensor) -> Handle:
        """As ``all_reduce_``; the tensor may be used again when the handle has been waited for. Also of the next two."""
        if self._background is None or is_silent() or not tensor.numel():
            self.all_reduce_(tensor)
            return DONE
        self.traffic.note(self.axis, "all_reduce", tensor.nbytes)
        return self._started("all_reduce", lambda inner: inner.all_reduce_(tensor))

    def start_reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> Handle:
        """As ``reduce_scatter``."""
        if self._background is None or is_silent() or not whole.numel():
            self.reduce_scatter(whole, own, counts)
            return DONE
        assert whole.numel() == sum(counts) and own.numel() == counts[self.rank]
        self.traffic.note(self.axis, "reduce_scatter", whole.nbytes)
        return self._started("reduce_scatter", lambda inner: inner.reduce_scatter(whole, own, counts))

    def start_all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> Handle:
        """As ``all_gather``; ``own`` must not change before the handle has been waited for."""
        if self._background is None or is_silent() or not whole.numel():
            self.all_gather(own, whole, counts)
            return DONE
        assert whole.numel() == sum(counts) and own.numel() == counts[self.rank]
        self.traffic.note(self.axis, "all_gather", whole.nbytes)
        return self._started("all_gather", lambda inner: inner.all_gather(own, whole, counts))

    def _started(self, operation: str, work: Callable[[Transport], None]) -> Handle:
        assert self._background is not None
        return _TimedHandle(self, operation, self._background.start(operation, work))

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Give ``sent[r]`` to rank r and get ``received[r]`` from it (all-to-all); shapes may differ."""
        if self.transport is None:
            received[0].copy_(sent[0])
            return
        if is_silent():
            for outgoing, incoming in zip(sent, received, strict=True):
                _pretend(outgoing, incoming)
            return
        with self.traffic.call(self.axis, "all_to_all", sum(part.nbytes for part in sent)):
            self.transport.all_to_all(sent, received)

    def ring_shift(self, sent: Tensor, received: Tensor, *, by: int = 1) -> None:
        """Give ``sent`` to the rank ``by`` places on around the ring, and get ``received`` from ``by`` places back."""
        if self.transport is None or is_silent():
            received.copy_(sent)
            return
        with self.traffic.call(self.axis, "ring_shift", sent.nbytes):
            self.transport.ring_shift(sent, received, by)

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Everyone gets the tensor of rank ``source`` of this channel."""
        if self.transport is not None and tensor.numel() and not is_silent():
            with self.traffic.call(self.axis, "broadcast", tensor.nbytes):
                self.transport.broadcast_(tensor, source)
        return tensor


class _TimedHandle(Handle):
    """An operation in the background: what its rank waits for it is time in which the rank does not compute."""

    def __init__(self, channel: Channel, operation: str, handle: Handle) -> None:
        self._channel, self._operation, self._handle = channel, operation, handle

    def wait(self) -> None:
        """See ``Handle``."""
        with self._channel.traffic.wait(self._channel.axis, self._operation):
            self._handle.wait()

    def then(self, call: Callable[[BaseException | None], None]) -> None:
        """See ``Handle``."""
        self._handle.then(call)


def _pretend(own: Tensor, received: Tensor) -> None:
    """Receive from a rank that has what this one has; a part of another size is filled with the first of it."""
    if own.shape == received.shape:
        received.copy_(own)
    elif own.numel():
        received.copy_(own.reshape(-1)[0])
    else:
        received.zero_()


class EchoTransport:
    """No peers: every operation does as if all ranks had what this one has, so that numbers stay finite. For rehearsals."""

    is_ordered = True

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

    is_ordered = True

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
