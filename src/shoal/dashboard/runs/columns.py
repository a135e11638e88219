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


class Table:
    """Rows of numbers with named columns, which only grow."""

    def __init__(self) -> None:
        self.rows = 0
        self.left_out = 0
        """Columns that were refused, because there are too many."""
        self._whole: dict[str, Column] = {}
        """Columns up to the row where they were put together last."""
        self._pieces: dict[str, list[Column]] = {}

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return list(self._whole)

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def append(self, columns: Mapping[str, Column], rows: int) -> None:
        """Add rows; a column that is known and not given is NaN, or 0 where it counts."""
        for name, values in columns.items():
            if name not in self._whole:
                if len(self._whole) >= _MOST_COLUMNS:
                    self.left_out += 1
                    continue
                self._whole[name] = _missing(values.dtype, 0)
                self._pieces[name] = [_missing(values.dtype, self.rows)] if self.rows else []
            self._pieces[name].append(values)
        for name, pieces in self._pieces.items():
            if name not in columns:
                pieces.append(_missing(self._whole[name].dtype, rows))
        self.rows += rows

    def column(self, name: str) -> Column:
        """All rows of a column; of one that is not there, NaN."""
        if name not in self._whole:
            return _missing(np.dtype(np.float64), self.rows)
        if self._pieces[name]:
            dtype = self._whole[name].dtype
            self._whole[name] = np.concatenate([self._whole[name], *self._pieces[name]], dtype=dtype, casting="unsafe")
            self._pieces[name] = []
        return self._whole[name]

    def last(self, name: str) -> float:
        """The newest value; NaN where there is none."""
        for piece in reversed(self._pieces.get(name, ())):
            if len(piece):
                return float(piece[-1])
        whole = self._whole.get(name)
        return float(whole[-1]) if whole is not None and len(whole) else float("nan")

    def arrays(self) -> dict[str, Column]:
        """All columns, whole."""
        return {name: self.column(name) for name in self._whole}

    @classmethod
    def of(cls, arrays: Mapping[str, Column], rows: int) -> "Table":
        """A table that begins with these columns, which are not copied."""
        table = cls()
        table._whole = dict(arrays)
        table._pieces = {name: [] for name in arrays}
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
