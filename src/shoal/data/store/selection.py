"""Some rows of a store in their order: as ranges where they lie together, by their numbers where they do not."""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class RowSelection:
    """Rows by their place in the selection.

    Args:
        starts: first row of each range, in order.
        stops: behind the last row of each range; ranges do not overlap.
    """

    def __init__(self, starts: Rows, stops: Rows) -> None:
        self.starts, self.stops = starts, stops
        lengths = stops - starts
        self._ends = np.cumsum(lengths)
        num_rows = int(self._ends[-1]) if len(starts) else 0
        # One number for each row is less to keep than two for each range, and quicker to look up.
        self._rows: Rows | None = None
        if len(starts) > 1 and 2 * len(starts) >= num_rows:
            self._rows = np.repeat(starts - (self._ends - lengths), lengths) + np.arange(num_rows)

    @classmethod
    def of(cls, rows: Rows) -> "RowSelection":
        """These rows, each once; they are put in order."""
        ordered = np.unique(np.asarray(rows, dtype=np.int64))
        if not len(ordered):
            return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
        starts = ordered[np.concatenate([[0], cuts])]
        stops = ordered[np.concatenate([cuts - 1, [len(ordered) - 1]])] + 1
        return cls(starts, stops)

    @classmethod
    def of_range(cls, rows: range) -> "RowSelection":
        """Rows next to one another."""
        if not len(rows):
            return cls.of(np.empty(0, dtype=np.int64))
        return cls(np.array([rows.start], dtype=np.int64), np.array([rows.stop], dtype=np.int64))

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, places: Rows) -> Rows:
        """The rows at these places of the selection."""
        places = np.asarray(places, dtype=np.int64)
        if len(self.starts) == 1:
            shifted: Rows = places + self.starts[0]
            return shifted
        if self._rows is not None:
            chosen: Rows = self._rows[places]
            return chosen
        number = np.searchsorted(self._ends, places, side="right")
        found: Rows = (self.stops[number] - (self._ends[number] - places)).astype(np.int64, copy=False)
        return found

    def blocks(self, starts: Rows) -> Rows:
        """Where blocks with these first rows begin among the places of the selection, and its length behind the last."""
        if not len(self):
            return np.zeros(1, np.int64)
        lengths = self.stops - self.starts
        number = np.searchsorted(self.starts, starts, side="right") - 1
        inside = np.maximum(number, 0)
        before = (self._ends - lengths)[inside] + np.minimum(starts - self.starts[inside], lengths[inside])
        found: Rows = np.unique(np.append(np.where(number < 0, 0, before), [0, len(self)]))
        return found

    def overlaps(self, other: "RowSelection") -> bool:
        """True where a row is in both."""
        starts = np.concatenate([self.starts, other.starts])
        stops = np.concatenate([self.stops, other.stops])
        order = np.argsort(starts, kind="stable")
        return bool((starts[order][1:] < stops[order][:-1]).any())
