"""What crossed between ranks: calls, bytes and seconds per axis and operation, and how much of that time was waiting.

A plan's traffic can be worked out beforehand, so a redundant or a missing collective is a difference between two numbers, found
without looking at a single gradient. The time tells who was late: where every rank's step takes as long as the slowest one's,
only those that did not wait were busy.

Waiting is sleeping or spinning until another rank has arrived, or until its bytes have come; transports say it where they do it.
What a rank does itself in a collective, such as adding and copying, is its own work. Each thread has its own count, because
exchanges that go on beside a step wait too, and nobody computes less for that.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Calls of one operation along one axis, and the bytes that they handled together."""

    calls: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(calls=self.calls + other.calls, num_bytes=self.num_bytes + other.num_bytes)


TrafficCounts = dict[tuple[str, str], Traffic]
"""Traffic by (axis, operation), such as ``("tp", "all_reduce")``."""


def add_traffic(*all_counts: Mapping[tuple[str, str], Traffic]) -> TrafficCounts:
    """All of them together."""
    total: TrafficCounts = {}
    for counts in all_counts:
        for key, traffic in counts.items():
            total[key] = total.get(key, Traffic()) + traffic
    return total


def plain_traffic(counts: Mapping[tuple[str, str], Traffic]) -> TrafficCounts:
    """The counts with plain words for their keys, in their order."""
    return {(str(axis), str(operation)): traffic for (axis, operation), traffic in sorted(counts.items())}


def traffic_rows(counts: Mapping[tuple[str, str], Traffic]) -> dict[str, list[int]]:
    """The counts as JSON: ``"tp all_reduce": [calls, bytes]``."""
    return {
        f"{axis} {operation}": [traffic.calls, traffic.num_bytes]
        for (axis, operation), traffic in plain_traffic(counts).items()
    }


class _Waited(threading.local):
    nanoseconds = 0


_WAITED = _Waited()


def waited_ns() -> int:
    """What this thread has waited since it began."""
    return _WAITED.nanoseconds


def note_wait(nanoseconds: int) -> None:
    """Add a wait of this thread."""
    _WAITED.nanoseconds += nanoseconds


@contextmanager
def waiting() -> Iterator[None]:
    """All that happens inside is waiting."""
    started = time.perf_counter_ns()
    try:
        yield
    finally:
        note_wait(time.perf_counter_ns() - started)


Crossed = tuple[str, str, int, int, int]
"""One call or wait, for spans: axis, operation, when it began and ended by ``perf_counter_ns``, bytes."""


@dataclass
class TrafficCounter:
    """Adds up the traffic of one rank; used by the thread that computes."""

    is_open: bool = False
    counts: TrafficCounts = field(default_factory=dict)
    totals: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Since the beginning: calls, bytes, and the nanoseconds that the thread that computes spent in them."""
    waits: dict[str, int] = field(default_factory=dict)
    """Nanoseconds of waiting for other ranks since the beginning, by axis."""
    crossed: list[Crossed] | None = None
    """Every call, in steps whose spans are recorded; None in the others."""

    def note(self, axis: str, operation: str, num_bytes: int) -> None:
        """Enter one call."""
        key = (axis, operation)
        total = self.totals.get(key)
        if total is None:
            total = self.totals[key] = [0, 0, 0]
        total[0] += 1
        total[1] += num_bytes
        if self.is_open:
            self.counts[key] = self.counts.get(key, Traffic()) + Traffic(calls=1, num_bytes=num_bytes)

    def call(self, axis: str, operation: str, num_bytes: int) -> "TimedCall":
        """Enter one call, and the time of what happens in this context."""
        self.note(axis, operation, num_bytes)
        return TimedCall(self, axis, operation, num_bytes)

    def wait(self, axis: str, operation: str, *, shown: str = "") -> "TimedCall":
        """Enter the time of what happens in this context, for a call that was entered before; ``shown`` is what spans call it."""
        return TimedCall(self, axis, operation, 0, shown)

    def spent(
        self,
        axis: str,
        operation: str,
        *,
        started_ns: int,
        ended_ns: int,
        waited_ns: int,
        num_bytes: int = 0,
        shown: str = "",
    ) -> None:
        """Enter the time of a call, and how much of it was waiting."""
        total = self.totals.get((axis, operation))
        if total is None:
            total = self.totals[axis, operation] = [0, 0, 0]
        total[2] += ended_ns - started_ns
        if waited_ns:
            self.waits[axis] = self.waits.get(axis, 0) + waited_ns
        if self.crossed is not None:
            self.crossed.append((axis, shown or operation, started_ns, ended_ns, num_bytes))

    def add(self, counts: Mapping[tuple[str, str], Traffic]) -> None:
        """Enter what another counter has counted."""
        for key, traffic in counts.items():
            total = self.totals.setdefault(key, [0, 0, 0])
            total[0] += traffic.calls
            total[1] += traffic.num_bytes
        if self.is_open:
            # In place: whoever counts holds this very dict.
            self.counts.update(add_traffic(self.counts, counts))

    def rows(self) -> dict[str, list[float]]:
        """All of it as JSON: ``"tp all_reduce": [calls, bytes, seconds]``."""
        return {
            f"{axis} {operation}": [calls, num_bytes, nanoseconds / 1e9]
            for (axis, operation), (calls, num_bytes, nanoseconds) in sorted(self.totals.items())
        }

    @contextmanager
    def counting(self) -> Iterator[TrafficCounts]:
        """Count from zero inside the context; the counts are complete when it is left."""
        self.counts, self.is_open = {}, True
        try:
            yield self.counts
        finally:
            self.is_open = False


class TimedCall:
    """The time of one call; of a wait that is no call of its own, with no bytes."""

    __slots__ = ("_axis", "_counter", "_num_bytes", "_operation", "_shown", "_started", "_waited")

    def __init__(self, counter: TrafficCounter, axis: str, operation: str, num_bytes: int, shown: str = "") -> None:
        self._counter, self._axis, self._operation, self._num_bytes = counter, axis, operation, num_bytes
        self._shown = shown

    def __enter__(self) -> None:
        """Begin."""
        self._waited = waited_ns()
        self._started = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, also of a call that failed."""
        self._counter.spent(
            self._axis,
            self._operation,
            started_ns=self._started,
            ended_ns=time.perf_counter_ns(),
            waited_ns=waited_ns() - self._waited,
            num_bytes=self._num_bytes,
            shown=self._shown,
        )


@dataclass
class ExchangeMeter:
    """What replicas or islands have sent each other in training steps, and what plain sums at every step would have been.

    Bytes are those that leave a rank, as a network carries them: a sum goes once around to be made and once to be told.
    """

    num_bytes: float = 0.0
    dense_bytes: float = 0.0

    @contextmanager
    def measuring(
        self, counter: TrafficCounter, axis: str, num_ranks: int, *, leaves_out_own: bool = False
    ) -> Iterator[None]:
        """Count what crosses along an axis inside the context.

        Args:
            counter: of the axis.
            axis: its name.
            num_ranks: on it.
            leaves_out_own: what a rank gives itself is not part of its messages, as in gossip.
        """
        before = _carried(counter, axis, num_ranks, leaves_out_own=leaves_out_own)
        try:
            yield
        finally:
            self.num_bytes += _carried(counter, axis, num_ranks, leaves_out_own=leaves_out_own) - before

    def add_dense(self, num_bytes: int, num_ranks: int) -> None:
        """Enter a sum of so many bytes that would have been made."""
        self.dense_bytes += 2 * num_bytes * (num_ranks - 1) / num_ranks


def _carried(counter: TrafficCounter, axis: str, num_ranks: int, *, leaves_out_own: bool) -> float:
    others = (num_ranks - 1) / num_ranks
    found = 0.0
    for (where, operation), (_, num_bytes, _) in counter.totals.items():
        if where == axis:
            is_told = leaves_out_own and operation == "all_to_all"
            found += num_bytes * (2 * others if operation.startswith("all_reduce") else 1.0 if is_told else others)
    return found
