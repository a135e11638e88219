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
    """Adds up the traffic of one rank. It costs nothing while it is closed."""

    is_open: bool = False
    counts: TrafficCounts = field(default_factory=dict)

    def note(self, axis: str, operation: str, num_bytes: int) -> None:
        """Enter one call."""
        if self.is_open:
            key = (axis, operation)
            self.counts[key] = self.counts.get(key, Traffic()) + Traffic(calls=1, num_bytes=num_bytes)

    def add(self, counts: Mapping[tuple[str, str], Traffic]) -> None:
        """Enter what another counter has counted."""
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
