"""Several threads that load batches side by side, for sources whose batches are waited for rather than computed.

The batches come out in their order, whoever was quicker. There are as many threads as it takes: one to begin with, one more each
time a batch had to be waited for, up to a limit. What is loaded and not yet handed out is bounded by ``depth`` and the threads.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from shoal.core.errors import RunError

P = TypeVar("P")
B = TypeVar("B")

MOST_READERS = 8
_WAITED_S = 1e-3
"""A batch that is waited for longer than this is worth another thread."""


class Readers(Generic[P, B]):
    """Loads one batch after the other, some ahead.

    Args:
        parts: what to load, in order; gone through by one thread at a time.
        load: makes a batch of a part; called by several threads at once.
        depth: batches that are loaded ahead, besides those that threads are at.
        most: threads at most.
    """

    def __init__(self, parts: Iterator[P], load: Callable[[P], B], *, depth: int, most: int = MOST_READERS) -> None:
        self._parts, self._load, self._most = parts, load, most
        self._depth = max(1, depth)
        self._change = threading.Condition()
        self._done: dict[int, B | BaseException] = {}
        self._num_taken, self._num_given = 0, 0
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self.most_held = 0
        """The most batches that were loaded or being loaded at a time, for tests."""
        self._add_thread()

    @property
    def num_readers(self) -> int:
        """Threads that load."""
        return len(self._threads)

    def next(self, deadline_s: float) -> B:
        """The next batch, in order.

        Raises:
            RunError: it did not come in time, or ``close`` was called.
            Exception: whatever loading it raised.
        """
        started = time.monotonic()
        with self._change:
            if self._is_closed:
                raise RunError("the loader was asked for a batch after close()")
            number = self._num_given
            if not self._change.wait_for(lambda: number in self._done, timeout=deadline_s):
                raise RunError(
                    f"waited {deadline_s:g} s for the next batch: the data source hangs, or is slower than that"
                )
            found = self._done[number]
            if isinstance(found, BaseException):
                raise found  # It stays where it is: whoever asks again gets it again.
            del self._done[number]
            self._num_given += 1
            self._change.notify_all()
            # The first batches are waited for in any case.
            was_late = time.monotonic() - started > _WAITED_S and number > self._depth
            if was_late and len(self._threads) < self._most:
                self._add_thread()
        return found

    def close(self) -> None:
        """Stop loading; returns soon even when a load hangs. May be called twice."""
        with self._change:
            self._is_closed = True
            self._done.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join(timeout=1.0 / len(self._threads))

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"reader-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(self._may_take)
                if self._is_closed:
                    return
                number = self._num_taken
                self._num_taken += 1
                self.most_held = max(self.most_held, self._num_taken - self._num_given)
                try:
                    part = next(self._parts)
                except BaseException as error:  # Handed over whole: it belongs to whoever asks for the batch.
                    self._put(number, error)
                    return
            try:
                found: B | BaseException = self._load(part)
            except BaseException as error:
                found = error
            with self._change:
                self._put(number, found)
                if isinstance(found, BaseException):
                    return

    def _may_take(self) -> bool:
        return self._is_closed or self._num_taken - self._num_given < self._depth + len(self._threads)

    def _put(self, number: int, found: B | BaseException) -> None:
        if not self._is_closed:
            self._done[number] = found
            self._change.notify_all()
