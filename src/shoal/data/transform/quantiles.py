"""Exact quantiles over shards: an order statistic is found digit by digit of its bits, by counts that are added up over shards.

No shard's values leave it until few of them are left in question, and nothing is sorted as a whole.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_SIGN = np.uint64(1 << 63)
_DIGIT = 16
_FEW = 1 << 18
"""So many values in question are gathered and sorted."""


def quantiles_of(shards: Sequence[NDArray[np.float64]], shares: Sequence[float]) -> list[float]:
    """The quantiles of the numbers of all shards, by linear interpolation between neighbours, as ``numpy.quantile`` has them."""
    keys = [_sortable(shard) for shard in shards]
    total = sum(map(len, keys))
    tops = sum(
        (np.bincount((part >> np.uint64(48)).astype(np.int64), minlength=1 << _DIGIT) for part in keys),
        start=np.zeros(1 << _DIGIT, np.int64),
    )
    found = []
    for share in shares:
        place = share * (total - 1)
        low = int(place)
        one = _select(keys, tops, low)
        other = _select(keys, tops, low + 1) if place > low else one
        weight = place - low
        # From the nearer end, as numpy does.
        found.append(other - (other - one) * (1 - weight) if weight >= 0.5 else one + (other - one) * weight)
    return found


def _sortable(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    bits = (values + 0.0).view(np.uint64)
    return np.where(bits >> np.uint64(63) == 1, ~bits, bits | _SIGN)


def _select(keys: list[NDArray[np.uint64]], counts: NDArray[np.int64], rank: int) -> float:
    prefix, shift = 0, 64 - _DIGIT
    while True:
        digit = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
        rank -= int(counts[:digit].sum())
        prefix = prefix << _DIGIT | digit
        keys = [part[part >> np.uint64(shift) == np.uint64(prefix)] for part in keys]
        if shift == 0 or sum(map(len, keys)) <= _FEW:
            key = np.sort(np.concatenate(keys))[rank]
            bits = key ^ _SIGN if key >> np.uint64(63) else ~key
            return float(np.array([bits], dtype=np.uint64).view(np.float64)[0])
        shift -= _DIGIT
        mask = np.uint64((1 << _DIGIT) - 1)
        counts = np.zeros(1 << _DIGIT, dtype=np.int64)
        for part in keys:
            counts += np.bincount(((part >> np.uint64(shift)) & mask).astype(np.int64), minlength=1 << _DIGIT)
