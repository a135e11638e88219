"""One event file as it is known so far: columns, the events that are no numbers, and where the spans of chosen steps lie."""

import os
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.dashboard.runs.columns import Table, as_number, numbers
from shoal.dashboard.runs.decode import Decoded, Other, decode, table_row
from shoal.dashboard.runs.files import Cursor, Identity, Refused, open_inside, read_range, why

_FIRST_EVENTS, _LAST_EVENTS = 1000, 4000
_KEPT_BYTES = 4 << 20
_FREQUENT = frozenset({"update", "work", "queues", "exchange", "log", "data_cache", "memory", "round"})
"""Kinds whose numbers are in tables; few of the events themselves are kept."""
_FREQUENT_EVENTS = 200
_MOST_NAMES = 1000
_MOST_TABLES = 100
_MOST_LATE = 100_000
_SPAN_BYTES = 4 << 20


@dataclass
class Kept:
    """Events of one kind: the first of them, the newest, and how many there were."""

    count: int = 0
    first: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Where each begins in the file, and the event."""
    last: deque[tuple[int, int, dict[str, Any]]] = field(default_factory=deque)
    """The same with its length."""
    first_bytes: int = 0
    last_bytes: int = 0

    def add(self, other: Other, *, few: bool) -> None:
        """Take an event, and let go of an older one where there are too many."""
        self.count += 1
        if len(self.first) < (_FREQUENT_EVENTS if few else _FIRST_EVENTS) and self.first_bytes < _KEPT_BYTES:
            self.first.append((other.start, other.event))
            self.first_bytes += other.length
            return
        self.last.append((other.start, other.length, other.event))
        self.last_bytes += other.length
        while len(self.last) > (_FREQUENT_EVENTS if few else _LAST_EVENTS) or self.last_bytes > _KEPT_BYTES:
            self.last_bytes -= self.last.popleft()[1]

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from self.first
        for start, _, event in self.last:
            yield start, event


@dataclass(frozen=True)
class SpanPlace:
    """Where the spans of a step lie in a file."""

    step: int
    start: int
    length: int


class EventFile:
    """An event file that is followed.

    Args:
        root: the folder that the file must lie in.
        path: of the file.
        rank: whose events; None for the supervisor's and other processes'.
    """

    def __init__(self, root: Path, path: Path, rank: int | None) -> None:
        self.rank = rank
        self.cursor = Cursor(root, path)
        self.refused = ""
        """Why it is not read; empty where it is."""
        self.restarts = 0
        """How often it was begun again, because it was truncated or replaced."""
        self._clear()

    def _clear(self) -> None:
        self.steps = Table()
        self.tables: dict[str, Table] = {}
        """Of other kinds, by kind; of evaluations by split as well: ``evaluated:validation``."""
        self.kept: dict[str, Kept] = {}
        """Other events, by kind."""
        self.spans: list[SpanPlace] = []
        self.staleness: dict[str, Counter[int]] = {}
        """How many gradients of each worker were how many updates late."""
        self.unknown: Counter[str] = Counter()
        """Events of kinds that this version does not write."""
        self.broken = 0
        """Lines that are no events."""
        self.newest = 0.0
        """The latest time of an event."""

    @property
    def timed(self) -> Table:
        """What the process says of its time: a rank's steps, a worker's work units."""
        return self.tables.get("work", self.steps)

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.cursor.path

    def update(self) -> Iterator[None]:
        """Read what is new, block by block; whoever iterates may let others look in between."""
        try:
            if not self.cursor.has_changed():
                return
            descriptor = open_inside(self.cursor.root, self.cursor.path)
        except Refused as refused:
            self.refused = str(refused)
            if self.cursor.offset:
                # What was read is forgotten, so all of it is read again where the file comes back.
                self.cursor.restart()
                self._clear()
            return
        except OSError as error:
            self.refused = why(error)
            return
        self.refused = ""
        try:
            if self.cursor.is_other_file(descriptor):
                self.cursor.restart()
                self._clear()
                self.restarts += 1
                yield
            # Before the lines, so that what is written meanwhile is a change at the next look.
            identity = Identity.of(os.fstat(descriptor))
            while (block := self.cursor.read(descriptor)) is not None:
                self._take(decode(block.data, block.start))
                yield
            self.cursor.identity = identity
        except OSError as error:
            self.refused = why(error)
        finally:
            os.close(descriptor)

    def _take(self, found: Decoded) -> None:
        self.broken += found.broken
        if found.num_steps:
            self.steps.append(found.steps, found.num_steps)
            self.newest = max(self.newest, float(found.steps["t"].max()))
        rows: dict[str, list[dict[str, float]]] = {}
        for other in found.others:
            kind = other.event["kind"]
            self.newest = max(self.newest, as_number(other.event["t"]))
            if not other.is_known:
                name = kind[:100]
                self.unknown[name if name in self.unknown or len(self.unknown) < _MOST_NAMES else "others"] += 1
            if kind == "spans":
                step = other.event.get("step")
                if isinstance(step, int) and other.length <= _SPAN_BYTES:
                    self.spans.append(SpanPlace(step, other.start, other.length))
                continue
            if (row := table_row(other.event)) is not None:
                split = other.event.get("split")
                table = f"evaluated:{split}"[:100] if kind == "evaluated" else kind
                rows.setdefault(table, []).append(row)
            if kind == "update":
                self._count_late(other.event)
            if kind in self.kept or len(self.kept) < _MOST_NAMES:
                self.kept.setdefault(kind, Kept()).add(other, few=kind in _FREQUENT)
        for kind, given in rows.items():
            names = list(dict.fromkeys(name for row in given for name in row))
            columns = {name: numbers([row.get(name) for row in given]) for name in names}
            if kind in self.tables or len(self.tables) < _MOST_TABLES:
                self.tables.setdefault(kind, Table()).append(columns, len(given))

    def _count_late(self, event: dict[str, Any]) -> None:
        workers, late = event.get("workers"), event.get("staleness")
        if not isinstance(workers, list) or not isinstance(late, list):
            return
        for worker, updates in zip(workers, late, strict=False):
            if not isinstance(worker, str) or type(updates) is not int or not 0 <= updates < _MOST_LATE:
                continue
            if worker in self.staleness or len(self.staleness) < _MOST_NAMES:
                self.staleness.setdefault(worker, Counter())[updates] += 1

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Kept events of these kinds, or of all but steps and spans, in the order of the file."""
        wanted = kinds or tuple(self.kept)
        found = [pair for kind in wanted if kind in self.kept for pair in self.kept[kind]]
        return [event for _, event in sorted(found, key=lambda pair: pair[0])]

    def read_spans(self, step: int) -> list[dict[str, Any]]:
        """The spans of a step, read from the file now; the newest of them last."""
        found = []
        for place in self.spans:
            if place.step != step:
                continue
            try:
                data = read_range(self.cursor.root, self.cursor.path, place.start, place.length)
            except (Refused, OSError):
                continue
            found += [
                other.event for other in decode(data + b"\n", place.start).others if other.event["kind"] == "spans"
            ]
        return [event for event in found if event.get("step") == step]
