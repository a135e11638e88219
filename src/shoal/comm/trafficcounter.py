"""What crossed between ranks: a count and a number of bytes per axis and operation.

A plan's traffic can be worked out beforehand, so a redundant or a missing collective is a difference between two numbers, found
without looking at a single gradient.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


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


@dataclass
class TrafficCounter:
    """Adds up the traffic of one rank: while it is open by calls, always by bytes, which is all that a summary tells."""

    is_open: bool = False
    counts: TrafficCounts = field(default_factory=dict)
    totals: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes since the beginning."""

    def note(self, axis: str, operation: str, num_bytes: int) -> None:
        """Enter one call."""
        key = (axis, operation)
        self.totals[key] = self.totals.get(key, 0) + num_bytes
        if self.is_open:
            self.counts[key] = self.counts.get(key, Traffic()) + Traffic(calls=1, num_bytes=num_bytes)

    def add(self, counts: Mapping[tuple[str, str], Traffic]) -> None:
        """Enter what another counter has counted."""
        for key, traffic in counts.items():
            self.totals[key] = self.totals.get(key, 0) + traffic.num_bytes
        if self.is_open:
            # In place: whoever counts holds this very dict.
            self.counts.update(add_traffic(self.counts, counts))

    @contextmanager
    def counting(self) -> Iterator[TrafficCounts]:
        """Count from zero inside the context; the counts are complete when it is left."""
        self.counts, self.is_open = {}, True
        try:
            yield self.counts
        finally:
            self.is_open = False


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
    for (where, operation), num_bytes in counter.totals.items():
        if where == axis:
            is_told = leaves_out_own and operation == "all_to_all"
            found += num_bytes * (2 * others if operation.startswith("all_reduce") else 1.0 if is_told else others)
    return found
