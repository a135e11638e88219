"""A curve at every zoom: buckets with their least and greatest value, their mean, and how many values were not finite.

A chart of a thousand pixels cannot show a million points, and one that leaves points out hides what people look for: a spike of
one step. A bucket keeps both extremes, so whatever the zoom, the spike is drawn. Buckets of 16, 256 and 4096 points are kept, and
what is asked for is put together from the largest that fit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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

    def cut(self, first: int, last: int) -> "_Sums":
        return _Sums(*(getattr(self, name)[first:last] for name in _NAMES))

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


class Pyramid:
    """Buckets of a curve, which may grow at its end."""

    def __init__(self) -> None:
        self.values: Floats = np.empty(0)
        self._levels = [_of_values(np.empty(0)) for _ in SIZES]

    def replace(self, values: Floats, *, kept: int) -> None:
        """Set the curve's values, of which the first ``kept`` are those of before."""
        kept = min(kept, len(self.values), len(values))
        for number, size in enumerate(SIZES):
            whole, full = kept // size, len(values) // size
            old = self._levels[number].cut(0, whole)
            fresh = _of_values(values[whole * size : full * size]).group(size)
            self._levels[number] = _joined([old, fresh])
        self.values = values

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
