"""Operations between hosts beside what a rank computes: a thread for each transport does them in the order of their starts.

Every rank starts the same operations of a group in the same order, so the threads of a group meet in each of them, and no rank
waits in one that another has not come to. While nothing is under way, the caller itself does what it waits for at once.

gloo's own ``async_op`` would not do: sums in the order of ranks and sums over two levels are several messages with arithmetic
and shared memory between them, and the next message must go out while the model computes.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.comm.channel import Handle, Transport
from shoal.comm.trafficcounter import waiting
from shoal.core.errors import RunError

_JOIN_SECONDS = 1.0


@dataclass(eq=False)
class _Started(Handle):
    """An operation of the thread."""

    operation: str
    work: Callable[[Transport], None]
    deadline_seconds: float
    failure: BaseException | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _calls: list[Callable[[BaseException | None], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        """See ``Handle``.

        Raises:
            RunError: the operation did not end although its messages have deadlines.
        """
        # Each message ends by its own deadline; several follow one another, and operations before this one wait too.
        with waiting():
            is_over = self._is_over.wait(_TIMEOUT_FACTOR * self.deadline_seconds)
        if not is_over:
            raise RunError(
                f"'{self.operation}' between hosts did not end within {_TIMEOUT_FACTOR * self.deadline_seconds:g} s; look at "
                "the other ranks' output for the cause"
            )
        if self.failure is not None:
            raise self.failure

    def then(self, call: Callable[[BaseException | None], None]) -> None:
        """See ``Handle``."""
        with self._lock:
            if not self._is_over.is_set():
                self._calls.append(call)
                return
        call(self.failure)

    def end(self, failure: BaseException | None) -> None:
        """Let those who wait go on."""
        with self._lock:
            self.failure = failure
            self._is_over.set()
        for call in self._calls:
            call(failure)


_TIMEOUT_FACTOR = 10


class ThreadedTransport:
    """A transport whose operations can be started and waited for later. Used by one thread, which need not be the same always."""

    def __init__(self, inner: Transport, *, name: str, deadline_seconds: float) -> None:
        self.inner = inner
        self.is_ordered = inner.is_ordered
        self._name = name
        self._deadline_seconds = deadline_seconds
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None
        """The thread after ``close``: it may still be at work."""
        self._queue: queue.SimpleQueue[_Started | None] = queue.SimpleQueue()
        self._last: _Started | None = None
        self._failure: BaseException | None = None

    def start(self, operation: str, work: Callable[[Transport], None]) -> Handle:
        """Begin an operation; those before it are done first. See ``Background``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"shoal {self._name}", daemon=True)
            self._thread.start()
        started = self._last = _Started(operation, work, self._deadline_seconds)
        self._queue.put(started)
        return started

    def all_reduce_(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        self._do("all_reduce", lambda inner: inner.all_reduce_(tensor))

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        self._do("all_reduce_max", lambda inner: inner.all_reduce_max_(tensor))

    def reduce_scatter(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``."""
        self._do("reduce_scatter", lambda inner: inner.reduce_scatter(whole, own, counts))

    def all_gather(self, own: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """See ``Transport``."""
        self._do("all_gather", lambda inner: inner.all_gather(own, whole, counts))

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See ``Transport``."""
        self._do("all_to_all", lambda inner: inner.all_to_all(sent, received))

    def ring_shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """See ``Transport``."""
        self._do("ring_shift", lambda inner: inner.ring_shift(sent, received, by))

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """See ``Transport``."""
        self._do("broadcast", lambda inner: inner.broadcast_(tensor, source))

    def close(self) -> bool:
        """Let the thread end when it has done what was started; closing twice is allowed. False while it is still at work."""
        if self._thread is not None:
            self._queue.put(None)
            self._ending, self._thread = self._thread, None
            # One that is stuck in a message to a lost peer ends by that message's deadline, or with the process.
            self._ending.join(_JOIN_SECONDS)
        if self._failure is None:
            self._failure = RunError(f"the mesh is closed, so axis {self._name} cannot be used any more")
        return self._ending is None or not self._ending.is_alive()

    def _do(self, operation: str, work: Callable[[Transport], None]) -> None:
        last = self._last
        if last is not None:
            if not last._is_over.is_set():
                self.start(operation, work).wait()
                return
            self._last = None
        if self._failure is not None:
            raise self._failure
        work(self.inner)

    def _serve(self) -> None:
        with torch.no_grad():
            while (started := self._queue.get()) is not None:
                if self._failure is None:
                    try:
                        started.work(self.inner)
                    except BaseException as error:  # It belongs to the thread that waits.
                        self._failure = error
                started.end(self._failure)
                # The tensors of an operation must not live until the next one comes.
                started.work = _nothing
                del started


def _nothing(_inner: Transport) -> None:
    """In the place of work that was done."""
