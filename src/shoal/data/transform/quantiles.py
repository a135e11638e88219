"""Exact quantiles in a few passes over blocks: an order statistic is found digit by digit of its bits, by counts that add up.

No block's values are kept until few of them are left, and nothing is sorted as a whole.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_SIGN = np.uint64(1 << 63)
_DIGIT = 16
_FEW = 1 << 18
"""So many values that may be the one are gathered and sorted."""
Values = NDArray[np.float64]


def quantiles_of(shards: Sequence[Values], shares: Sequence[float]) -> list[float]:
    """The quantiles of the numbers of all shards, by linear interpolation between neighbours, as ``numpy.quantile`` has them."""
    return quantiles_by_column(lambda: ([shard] for shard in shards), 1, shares)[1][0]


def quantiles_by_column(
    read: Callable[[], Iterable[Sequence[Values]]], num_columns: int, shares: Sequence[float]
) -> tuple[list[int], list[list[float]]]:
    """How many numbers every column has, and their quantiles; NaN of a column that has none.

    Args:
        read: begins a pass: the numbers of every column, block by block. There are four passes at most.
        num_columns: how many.
        shares: which quantiles.
    """
    columns = [_Column(shares) for _ in range(num_columns)]
    while open_ones := [place for place, column in enumerate(columns) if column.searches]:
        for parts in read():
            for place in open_ones:
                columns[place].look(parts[place])
        for place in open_ones:
            columns[place].turn()
    return [column.total for column in columns], [column.quantiles() for column in columns]


@dataclass
class _Search:
    """Which values, among those that begin with these bits, have some places in their order?"""

    prefix: int = 0
    shift: int = 64
    """Bits behind the prefix."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """In the order of all values, and among those of the prefix."""
    is_few: bool = False
    kept: list[NDArray[np.uint64]] = field(default_factory=list)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1 << _DIGIT, np.int64))

    def look(self, keys: NDArray[np.uint64]) -> None:
        inside = keys if self.shift == 64 else keys[keys >> np.uint64(self.shift) == np.uint64(self.prefix)]
        if self.is_few:
            self.kept.append(inside)
            return
        digits = inside >> np.uint64(self.shift - _DIGIT) & np.uint64((1 << _DIGIT) - 1)
        self.counts += np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT)


class _Column:
    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._answers: dict[int, float] = {}
        self.searches = [_Search()]
        self.total = -1

    def look(self, values: Values) -> None:
        keys = _sortable(values)
        for search in self.searches:
            search.look(keys)

    def turn(self) -> None:
        """After a pass: what was counted leads to longer prefixes, what was gathered answers."""
        if self.total < 0:
            (first,) = self.searches
            self.total = int(first.counts.sum())
            wanted = {at for share in self._shares for at in self._neighbours(share)[:2]} if self.total else set()
            first.places = [(at, at) for at in sorted(wanted)]
        following: dict[int, _Search] = {}
        for search in self.searches:
            if search.is_few:
                keys = np.sort(np.concatenate(search.kept))
                self._answers |= {at: _value(int(keys[inside])) for at, inside in search.places}
                continue
            ends = np.cumsum(search.counts)
            for at, inside in search.places:
                digit = int(np.searchsorted(ends, inside, side="right"))
                prefix, count = search.prefix << _DIGIT | digit, int(search.counts[digit])
                if search.shift == _DIGIT:
                    self._answers[at] = _value(prefix)
                    continue
                found = following.setdefault(
                    prefix, _Search(prefix=prefix, shift=search.shift - _DIGIT, is_few=count <= _FEW)
                )
                found.places.append((at, inside - int(ends[digit]) + count))
        self.searches = list(following.values())

    def quantiles(self) -> list[float]:
        if not self.total:
            return [float("nan")] * len(self._shares)
        found = []
        for share in self._shares:
            low, high, weight = self._neighbours(share)
            one, other = self._answers[low], self._answers[high]
            # From the nearer end, as numpy does.
            found.append(other - (other - one) * (1 - weight) if weight >= 0.5 else one + (other - one) * weight)
        return found

    def _neighbours(self, share: float) -> tuple[int, int, float]:
        place = share * (self.total - 1)
        low = int(place)
        return low, low + 1 if place > low else low, place - low


def _sortable(values: Values) -> NDArray[np.uint64]:
    bits = (values + 0.0).view(np.uint64)
    return np.where(bits >> np.uint64(63) == 1, ~bits, bits | _SIGN)


def _value(key: int) -> float:
    """The number whose bits were made sortable."""
    bits = key ^ (1 << 63) if key >> 63 else ~key & (1 << 64) - 1
    return float(np.array([bits], dtype=np.uint64).view(np.float64)[0])
