"""The hash of row ids that an epoch's receipt adds up."""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 32) - 1


def hash_rows(ids: NDArray[np.int64]) -> int:
    """The sum of 128-bit hashes of these ids, modulo 2^128."""
    total = 0
    for half, key in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
        values = ids.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
        values = values ^ (values >> np.uint64(31))
        low = int((values & np.uint64(_MASK)).sum(dtype=np.uint64))
        high = int((values >> np.uint64(32)).sum(dtype=np.uint64))
        total += (low + (high << 32)) << (64 * half)
    return total % 2**128
