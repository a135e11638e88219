"""A curve at every zoom: buckets with their least and greatest value, their mean, and how many values were not finite.

A chart of a thousand pixels cannot show a million points, and one that leaves points out hides what people look for: a spike of
one step. A bucket keeps both extremes, so whatever the zoom, the spike is drawn. Buckets of 16, 256 and 4096 points are kept, and
what is asked for is put together from the largest that fit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.dashboard.runs.columns import Growing

Floats = npt.NDArray[np.float64]
SIZES = (16, 256, 4096)


@dataclass(frozen=True)
class Buckets:
    """Of consecutive points: NaN where none of a bucket's values is finite."""

    low: Floats
    high: Floats
    mean: Floats
    bad: npt.NDArray[np.int64]
    """Values that were not finite."""


@dataclass(frozen=True)
class _Sums:
    """What buckets are made of, so that larger ones are made of smaller ones without a loss."""

    low: Floats
    high: Floats
    total: Floats
    good: npt.NDArray[np.int64]
    bad: npt.NDArray[np.int64]

    def group(self, size: int) -> "_Sums":
        """Each ``size`` neighbours as one; the last one may have fewer."""
        if not len(self.low) or size == 1:
            return self
        starts = np.arange(0, len(self.low), size)
        return _Sums(
            np.fmin.reduceat(self.low, starts),
            np.fmax.reduceat(self.high, starts),
            np.add.reduceat(self.total, starts),
            np.add.reduceat(self.good, starts),
            np.add.reduceat(self.bad, starts),
        )


_NAMES = ("low", "high", "total", "good", "bad")


def _of_values(values: Floats) -> _Sums:
    finite = np.isfinite(values)
    clean = values if finite.all() else np.where(finite, values, np.nan)
    return _Sums(
        clean, clean, np.where(finite, values, 0.0), finite.astype(np.int64), np.logical_not(finite).astype(np.int64)
    )


def _joined(parts: list[_Sums]) -> _Sums:
    return _Sums(*(np.concatenate([getattr(part, name) for part in parts]) for name in _NAMES))


class _Level:
    """Buckets of one size, which grow at their end."""

    def __init__(self) -> None:
        empty = _of_values(np.empty(0))
        self._columns = {name: Growing(getattr(empty, name)) for name in _NAMES}

    def extend(self, sums: _Sums) -> None:
        for name, column in self._columns.items():
            column.extend(getattr(sums, name))

    def cut(self, first: int, last: int) -> _Sums:
        return _Sums(*(self._columns[name].values[first:last] for name in _NAMES))

    def shorten(self, count: int) -> None:
        for column in self._columns.values():
            column.cut(count)


class Pyramid:
    """Buckets of a curve, which may grow at its end."""

    def __init__(self) -> None:
        self._values = Growing(np.empty(0))
        self._levels = [_Level() for _ in SIZES]

    @property
    def values(self) -> Floats:
        """The values themselves."""
        found: Floats = self._values.values
        return found

    def extend(self, values: Floats) -> None:
        """Add values at the end. What this costs is what is added."""
        before = len(self.values)
        self._values.extend(values)
        for level, size in zip(self._levels, SIZES, strict=True):
            first, last = before // size * size, len(self.values) // size * size
            if last > first:
                level.extend(_of_values(self.values[first:last]).group(size))

    def shorten(self, count: int) -> None:
        """Forget what comes after so many values."""
        self._values.cut(count)
        for level, size in zip(self._levels, SIZES, strict=True):
            level.shorten(count // size)

    def cut(self, first: int, last: int, points: int) -> tuple[Buckets, npt.NDArray[np.int64], bool]:
        """At most about ``points`` buckets of the values from ``first`` to before ``last``.

        Returns:
            The buckets, the index of the middle value of each, and whether each is one value.
        """
        last = min(last, len(self.values))
        first = min(max(first, 0), last)
        count = last - first
        if count <= max(points, 1):
            return _buckets(_of_values(self.values[first:last])), np.arange(first, last), True
        wanted = -(-count // max(points, 1))
        level = max((number for number, size in enumerate(SIZES) if size <= wanted), default=-1)
        size = SIZES[level] if level >= 0 else 1
        # Whole buckets of the level inside; what sticks out at both ends is made of the values themselves.
        left, right = -(-first // size), last // size
        if left >= right or level < 0:
            grouped = _of_values(self.values[first:last]).group(wanted)
            return _buckets(grouped), _middles(first, last, wanted), False
        step = max(wanted // size, 1)
        parts, middles = [], []
        if first < left * size:
            parts.append(_of_values(self.values[first : left * size]).group(size))
            middles.append(np.array([(first + left * size) // 2]))
        parts.append(self._levels[level].cut(left, right).group(step))
        middles.append(_middles(left * size, right * size, step * size))
        if right * size < last:
            parts.append(_of_values(self.values[right * size : last]).group(size))
            middles.append(np.array([(right * size + last) // 2]))
        return _buckets(_joined(parts)), np.concatenate(middles), False


def _middles(first: int, last: int, size: int) -> npt.NDArray[np.int64]:
    """The index in the middle of each ``size`` neighbours, of which the last may have fewer."""
    starts: npt.NDArray[np.int64] = np.arange(first, last, size)
    middles: npt.NDArray[np.int64] = starts + np.minimum(size, last - starts) // 2
    return middles


def _buckets(sums: _Sums) -> Buckets:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return Buckets(sums.low, sums.high, sums.total / np.where(sums.good, sums.good, np.nan), sums.bad)


def finite_list(values: npt.NDArray[Any]) -> list[float | int | None]:
    """As JSON takes them: None for what is not finite."""
    plain: list[float | int | None] = values.tolist()
    if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
        return plain
    return [value if ok else None for value, ok in zip(plain, np.isfinite(values).tolist(), strict=True)]
