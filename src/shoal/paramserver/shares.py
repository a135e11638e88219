"""Portions of unequal size: which samples of a step each has. No torch, because a request is checked by it."""

import math
from collections.abc import Sequence


def stretch_of(num_samples: int, share: int, sizes: Sequence[float]) -> tuple[int, int]:
    """Where a share begins and ends among the samples of a step, when shares are of these sizes beside each other."""
    total = math.fsum(sizes)
    start, stop = (round(num_samples * math.fsum(sizes[:end]) / total) for end in (share, share + 1))
    return start, stop


def portion_samples(global_batch: int, sizes: Sequence[float]) -> list[int]:
    """Samples of every portion of a whole step, of portions of these sizes beside each other."""
    ends = [stretch_of(global_batch, share, sizes) for share in range(len(sizes))]
    return [stop - start for start, stop in ends]
