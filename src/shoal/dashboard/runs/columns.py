"""Numbers of many events as columns: a million steps are a few megabytes here, and a gigabyte as Python's objects.

A ``Table`` takes rows in pieces and hands out each column as one array. A column that appears later, because an event gained a
field or a step a phase, is NaN before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
_MOST_COLUMNS = 256
"""Names of phases, axes and logged values are whatever a file says; a file with more of them is not one of ours."""


class Growing:
    """One array that grows at its end: what is added costs what it is, however much there is already.

    Args:
        begin: what it begins with, which is not copied before something is added.
    """

    def __init__(self, begin: Column) -> None:
        self._data, self.size = begin, len(begin)

    def extend(self, values: Column) -> None:
        """Add values at the end."""
        size = self.size + len(values)
        if size > len(self._data) or not self._data.flags.writeable:
            grown = np.empty(max(size + size // 2, 64), self._data.dtype)
            grown[: self.size] = self.values
            self._data = grown
        with np.errstate(invalid="ignore", over="ignore"):
            self._data[self.size : size] = values
        self.size = size

    def cut(self, size: int) -> None:
        """Forget what comes after so many."""
        self.size = min(self.size, size)

    @property
    def values(self) -> Column:
        """All of it, not copied."""
        return self._data[: self.size]


class Rows:
    """Rows of a table from one on.

    Args:
        columns: all of them.
        first: the first row.
        rows: of the table.
    """

    def __init__(self, columns: Mapping[str, Growing], first: int, rows: int) -> None:
        self._columns, self._first, self._rows = columns, first, rows

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return list(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str) -> Column:
        """A column; of one that is not there, NaN."""
        found = self._columns.get(name)
        if found is None:
            return _missing(np.dtype(np.float64), self._rows - self._first)
        return found.values[self._first :]


class Table:
    """Rows of numbers with named columns, which only grow."""

    def __init__(self) -> None:
        self.rows = 0
        self.left_out = 0
        """Columns that were refused, because there are too many."""
        self._columns: dict[str, Growing] = {}

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return list(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def append(self, columns: Mapping[str, Column], rows: int) -> None:
        """Add rows; a column that is known and not given is NaN, or 0 where it counts."""
        for name, values in columns.items():
            if name not in self._columns:
                if len(self._columns) >= _MOST_COLUMNS:
                    self.left_out += 1
                    continue
                self._columns[name] = Growing(_missing(values.dtype, self.rows))
            self._columns[name].extend(values)
        self.rows += rows
        for known in self._columns.values():
            if known.size < self.rows:
                known.extend(_missing(known.values.dtype, self.rows - known.size))

    def since(self, first: int) -> Rows:
        """The rows from one on."""
        return Rows(self._columns, first, self.rows)

    def column(self, name: str) -> Column:
        """All rows of a column; of one that is not there, NaN."""
        return self.since(0).column(name)

    def last(self, name: str) -> float:
        """The newest value; NaN where there is none."""
        found = self._columns.get(name)
        return float(found.values[-1]) if found is not None and found.size else float("nan")

    def arrays(self) -> dict[str, Column]:
        """All columns, whole."""
        return {name: known.values for name, known in self._columns.items()}

    def rebase(self, arrays: Mapping[str, Column]) -> None:
        """Keep the same values elsewhere: in pages of a file, which are not copied before a row is added."""
        self._columns = {name: Growing(values) for name, values in arrays.items()}

    @classmethod
    def of(cls, arrays: Mapping[str, Column], rows: int) -> "Table":
        """A table that begins with these columns, which are not copied."""
        table = cls()
        table.rebase(arrays)
        table.rows = rows
        return table


def _missing(dtype: np.dtype[Any], rows: int) -> Column:
    return np.full(rows, np.nan, dtype) if dtype.kind == "f" else np.zeros(rows, dtype)


def numbers(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Numbers as a column; of ``"nan"``, ``"inf"``, ``"-inf"`` those, and NaN for whatever is no number."""
    try:
        return np.fromiter(values, np.float64, len(values))
    except (TypeError, ValueError):
        return np.fromiter((as_number(value) for value in values), np.float64, len(values))


def as_number(value: object) -> float:
    """A number of an event, as ``numbers`` has it."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return float("nan")
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def rows_that_count(steps: Column, *, repeats: bool = False) -> Column | None:
    """The indices of the rows that no later row takes back; None where that is all.

    After a restart from a checkpoint, and after a step is done again, steps go on from a smaller number: what was written beyond
    it is not part of what the run became.

    Args:
        steps: of the rows, as they were written.
        repeats: True where several rows of a step all count.
    """
    if len(steps) < 2 or bool((steps[1:] >= steps[:-1] if repeats else steps[1:] > steps[:-1]).all()):
        return None
    least_after = np.minimum.accumulate(steps[::-1])[::-1][1:]
    return np.flatnonzero(np.append(least_after >= steps[:-1] if repeats else least_after > steps[:-1], True))
