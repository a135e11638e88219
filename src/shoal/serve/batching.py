"""Gathers requests that come close together into one pass of the model, in one thread."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from shoal.serve.models import ServedModel
from shoal.serve.schema import Row

Answer = tuple[ServedModel, list[NDArray[Any]]]


class Overloaded(Exception):
    """More rows wait than may."""


class TooLate(Exception):
    """The deadline passed before the rows had their turn."""


@dataclass(kw_only=True)
class _Request:
    rows: Sequence[Row]
    fields: object
    deadline: float
    future: "Future[Answer]" = field(default_factory=Future)


class Batcher:
    """Answers requests with the model that is current when their turn comes; a request has one model for all of its rows.

    Args:
        current: gives the model.
        max_wait: seconds that a request waits for others.
        most_waiting: rows that may wait.
    """

    def __init__(self, current: Callable[[], ServedModel], *, max_wait: float, most_waiting: int = 4096) -> None:
        self._current, self._max_wait, self._most_waiting = current, max_wait, most_waiting
        self._waiting: deque[_Request] = deque()
        self._num_waiting = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self.passes = 0
        """Batches that were worked off."""
        self.rows = 0
        """Rows that were answered."""
        self._thread = threading.Thread(target=self._work, name="predictions", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Rows that have not had their turn."""
        return self._num_waiting

    def submit(self, rows: Sequence[Row], fields: object, *, seconds: float) -> "Future[Answer]":
        """Ask for the scores of rows.

        Args:
            rows: that were checked.
            fields: of the model that they were checked against; of a model with others they are not asked.
            seconds: after which nobody waits any more.

        Raises:
            Overloaded: too many wait already.
        """
        request = _Request(rows=rows, fields=fields, deadline=time.monotonic() + seconds)
        with self._changed:
            if self._is_closing or self._num_waiting + len(rows) > self._most_waiting:
                raise Overloaded(f"{self._num_waiting} rows wait, and {self._most_waiting} may")
            self._waiting.append(request)
            self._num_waiting += len(rows)
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Answer what waits, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout=30)

    def _work(self) -> None:
        while (requests := self._gather()) is not None:
            served = self._current()
            ready = []
            for request in requests:
                if not request.future.set_running_or_notify_cancel():
                    continue
                if time.monotonic() > request.deadline:
                    request.future.set_exception(TooLate("the request waited longer than its deadline"))
                elif request.fields != served.fields:
                    request.future.set_exception(TooLate("the model takes other inputs since a moment ago; ask again"))
                else:
                    ready.append(request)
            self._answer(served, ready)

    def _gather(self) -> list[_Request] | None:
        """The next requests; None where no more will come."""
        with self._changed:
            while not self._waiting:
                if self._is_closing:
                    return None
                self._changed.wait()
            full, until = self._current().batch, time.monotonic() + self._max_wait
            while self._num_waiting < full and not self._is_closing and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            taken: list[_Request] = []
            count = 0
            while self._waiting and (not taken or count + len(self._waiting[0].rows) <= full):
                taken.append(self._waiting.popleft())
                count += len(taken[-1].rows)
            self._num_waiting -= count
            return taken

    def _answer(self, served: ServedModel, requests: Sequence[_Request]) -> None:
        if not requests:
            return
        try:
            found = served.predict([row for request in requests for row in request.rows])
        # The model is the user's own; what it raises is an answer to these requests and not the end of the server.
        except Exception as error:
            for request in requests:
                request.future.set_exception(error)
            return
        self.passes += 1
        self.rows += len(found)
        start = 0
        for request in requests:
            request.future.set_result((served, found[start : start + len(request.rows)]))
            start += len(request.rows)
