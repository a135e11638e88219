"""The event file of a rank, written beside training and never in its way.

``write`` appends to a bounded queue and returns: it takes no lock, wakes nobody and cannot fail. A thread looks at the queue four
times a second and does everything that can block or break: encoding, the file, TensorBoard. When it falls behind, events are
dropped and counted; when the disk is full, lines are lost and counted; when a sink raises, it is let go. Each is said once.

A kill loses what the thread has not looked at. So a checkpoint asks for a ``flush`` before it counts: whoever goes on from it
finds the steps that led there in the file.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from shoal.core.events import Event, StepDone
from shoal.core.rundir import RunDir
from shoal.telemetry.lines import encode_event, open_lines

_LOOK_EVERY_S = 0.25
_CLOSE_WITHIN_S = 5.0


class Sink(Protocol):
    """Another place that events go to, of steps only some. Made, used and closed on the writer's thread; may raise anything."""

    def write(self, event: Event, wall_time: float) -> None:
        """Take one event."""

    def close(self) -> None:
        """Flush what is left."""


def warn_on_stderr(message: str) -> None:
    """The usual way for a rank to say something; the supervisor adds which rank it was."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class EventLog:
    """Events of one rank, appended to ``events/rank-NNN.jsonl`` and offered to every sink."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        *,
        sinks: Sequence[Callable[[], Sink]] = (),
        capacity: int = 10_000,
        warn: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        self.dropped = 0
        """Events refused because the queue was full."""
        self.lost = 0
        """Events that were taken and could not be written to the file."""
        self._path = RunDir(run_dir).events(rank)
        self._rank = rank
        self._warn = warn
        self._warned: set[str] = set()
        self._capacity = capacity
        self._queue: deque[tuple[float, Event]] = deque()
        self._file: BinaryIO | None = None
        self._is_torn = False
        self._sinks: list[Sink] = []
        self._marks: deque[threading.Event] = deque()
        """Of those who wait until everything before them is in the file."""
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(tuple(sinks),), name="event-log", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue an event; it is on disk within half a second. Never blocks and never raises."""
        if len(self._queue) >= self._capacity or self._closing.is_set():
            self.dropped += 1
        else:
            self._queue.append((time.time(), event))

    def flush(self) -> None:
        """Wait until everything that was queued is in the file, for a few seconds at most. Not for the loop: this blocks.

        A disk or a sink that does not answer loses what the file lacks then, as ``write`` would, and holds up nobody for longer.
        """
        mark = threading.Event()
        self._marks.append(mark)
        self._woken.set()
        if self._thread.is_alive():
            mark.wait(_CLOSE_WITHIN_S)

    def close(self) -> None:
        """Write what is queued and stop. Gives up on a disk or a sink that does not answer within a few seconds."""
        self._closing.set()
        self._woken.set()
        self._thread.join(timeout=_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            self._warn_once(
                "close", f"events of rank {self._rank} were still being written after {_CLOSE_WITHIN_S:g} s"
            )
        elif self.dropped or self.lost:
            self._warn_once("count", f"{self.dropped} events were dropped and {self.lost} lost from {self._path}")

    def _run(self, factories: tuple[Callable[[], Sink], ...]) -> None:
        for factory in factories:
            self._guard(lambda factory=factory: self._sinks.append(factory()))  # type: ignore[misc]
        while not self._closing.is_set():
            self._woken.wait(_LOOK_EVERY_S)
            self._woken.clear()
            self._drain()
        self._drain()
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            self._guard(sink.close)

    def _drain(self) -> None:
        # Before the queue: who sets a mark later may have written later too.
        marks = [self._marks.popleft() for _ in range(len(self._marks))]
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        if batch:
            self._append(batch)
        for mark in marks:
            mark.set()
        shown = _newest_step_only(batch)
        for sink in tuple(self._sinks):
            if not self._guard(lambda sink=sink: _offer(sink, shown)):  # type: ignore[misc]
                self._sinks.remove(sink)

    def _append(self, batch: Sequence[tuple[float, Event]]) -> None:
        try:
            lines = b"".join(encode_event(event, rank=self._rank, wall_time=wall_time) for wall_time, event in batch)
            if self._is_torn:
                lines = b"\n" + lines
            if self._file is None:
                self._file = open_lines(self._path)
            written = self._file.write(lines)
            self._is_torn = written != len(lines)
            problem = f"only {written} of {len(lines)} bytes were taken" if self._is_torn else ""
        except (
            OSError,
            ValueError,
            TypeError,
        ) as error:  # a full disk, a file closed under us, a field that is no data
            self._is_torn = self._file is not None
            problem = str(error)
        if problem:
            self.lost += len(batch)
            self._warn_once("file", f"cannot write events to {self._path}: {problem}; training goes on")

    def _guard(self, action: Callable[[], None]) -> bool:
        # The one broad except of this room: a sink is somebody else's code, and training must outlive whatever it raises.
        try:
            action()
        except Exception as error:
            self._warn_once(
                "sink", f"a telemetry sink failed and is off: {type(error).__name__}: {error}; training goes on"
            )
            return False
        return True

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self._warn(message)


def _newest_step_only(batch: Sequence[tuple[float, Event]]) -> list[tuple[float, Event]]:
    """The events without all steps but the last: a curve of four points a second is enough, and a point costs 0.1 ms."""
    last = max((index for index, (_, event) in enumerate(batch) if isinstance(event, StepDone)), default=-1)
    return [pair for index, pair in enumerate(batch) if index == last or not isinstance(pair[1], StepDone)]


def _offer(sink: Sink, batch: Sequence[tuple[float, Event]]) -> None:
    for wall_time, event in batch:
        sink.write(event, wall_time)
