"""Events as lines of a file, and the event file of a rank, which is written beside training and never delays it.

An event is one line of JSON; a file that a kill left torn is continued. ``EventWriter.write`` appends to a bounded queue and
returns: it takes no lock, wakes nobody and cannot fail. A thread looks at the queue four times a second and does everything
that can block or break: encoding, the file, TensorBoard. When it falls behind, events are dropped and counted; when the disk is
full, lines are lost and counted; when a sink raises, it is let go. Each is reported once.

A kill loses what the thread has not looked at. So a checkpoint asks for a ``flush`` before it counts: a run that goes on from
it finds the steps that led there in the file.
"""

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shoal.core.events import Event, StepDone
from shoal.core.rundir import RunDir
from shoal.telemetry.measurements import MEASUREMENTS

KNOWN_KINDS: dict[str, type[Event]] = {known.kind: known for known in (*Event.__subclasses__(), *MEASUREMENTS)}
"""The events that this version writes, by their kinds."""
_NOT_FINITE = (None, "nan", "inf", "-inf")
"""What a number may be in a file that has no such numbers; older files have null."""


def encode_event(event: Event, *, rank: int | None, wall_time: float) -> bytes:
    """One line, with its newline. ``rank`` is None for what the supervisor says.

    NaN and infinity are no JSON: they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, and ``float()`` reads them.
    """
    return plain_json({"t": round(wall_time, 6), "rank": rank, **event.as_dict()}).encode() + b"\n"


def plain_json(values: Mapping[str, Any]) -> str:
    """Values as JSON on one line; of numbers that are not finite as ``encode_event`` says."""
    try:
        return json.dumps(values, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(values), allow_nan=False, default=str)


def decode_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The events in lines of a file, without those that a kill or a full disk has torn, and without what is no event."""
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and is_event(event):
            yield event


def is_event(event: dict[str, Any]) -> bool:
    """False for an event of a kind that is known whose time or fields are missing, or are no numbers where numbers belong."""
    known = KNOWN_KINDS.get(str(event.get("kind")))
    if not _is_number(event.get("t")):
        return False
    return known is None or all(_has_field(event, field) for field in fields(known))


def _has_field(event: dict[str, Any], field: Field[Any]) -> bool:
    if field.name not in event:
        return field.default is not MISSING or field.default_factory is not MISSING
    value = event[field.name]
    if field.type is int:
        return type(value) is int
    return field.type is not float or _is_number(value) or value in _NOT_FINITE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def open_lines(path: Path) -> BinaryIO:
    """A file to append lines to, unbuffered; a last line without its newline is ended first.

    Raises:
        OSError: the folder cannot be made or the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)
    try:
        if _is_torn(path):
            file.write(b"\n")
    except OSError:
        file.close()
        raise
    return file


def append_event(path: Path, event: Event, *, rank: int | None) -> bool:
    """Write one event at once, for a process that has few of them; False when the disk would not take it."""
    line = encode_event(event, rank=rank, wall_time=time.time())
    try:
        with open_lines(path) as file:
            return file.write(line) == len(line)
    except OSError:
        return False


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seekable() or file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) not in (b"\n", b"")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


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
