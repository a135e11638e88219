"""How well an order mixes, and what it costs to read: measured, as values.

Data that is sorted by its label is the worst case of an order that reads neighbours together, so a label is made of a sample's
number. A perfect shuffle has chi2 per degree of freedom 1, a variance ratio of 1 and no correlation from batch to batch.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.data.order import Ids
from shoal.data.sampling.samplers import Sampling

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class OrderQuality:
    """What was measured of some batches of an epoch."""

    chi2: float
    """Per degree of freedom, of the classes of a label that rises with the number of a sample."""
    variance_ratio: float
    """Variance of the batches' mean over that of means of as many samples drawn by chance."""
    lag1: float
    """Correlation of a batch's mean with the next one's."""
    blocks_per_batch: float
    """Distinct blocks that a batch has samples of."""
    fetches_per_block: float
    """How often a block is fetched in these batches, by a cache of ``cache_blocks`` that drops the one used longest
    ago."""
    batches: int
    """That were measured."""


def measure_order(
    sampling: Sampling,
    starts: NDArray[np.int64],
    *,
    batch: int,
    cache_blocks: int,
    epoch: int = 0,
    most_batches: int | None = None,
) -> OrderQuality:
    """Measure the first batches of an epoch, all of them when ``most_batches`` is left out.

    Args:
        sampling: the order.
        starts: the first sample of each block, and the number of samples behind the last.
        batch: samples of a global batch.
        cache_blocks: blocks that are kept.
        epoch: which.
        most_batches: that are looked at.
    """
    count = sampling.count(epoch)
    num_batches = count // batch
    if most_batches is not None:
        num_batches = min(num_batches, most_batches)
    chi2, means, distinct = [], [], []
    cache = _Cache(cache_blocks)
    for number in range(num_batches):
        ids = sampling.ids(epoch, slice(number * batch, (number + 1) * batch))
        chi2.append(_chi2(ids, count))
        means.append(float(ids.mean()))
        blocks = np.searchsorted(starts, ids, side="right") - 1
        distinct.append(len(np.unique(blocks)))
        cache.read(blocks)
    centred = np.asarray(means) - np.mean(means)
    spread = float(np.mean(centred**2))
    # Of means of samples that are drawn without putting them back; numbers from 0 to n - 1 have the variance (n^2 - 1) / 12.
    expected = (count**2 - 1) / 12 / batch * (1 - batch / count)
    lag1 = float(np.mean(centred[1:] * centred[:-1]) / spread) if num_batches > 2 and spread > 0 else 0.0
    return OrderQuality(
        chi2=float(np.mean(chi2)),
        variance_ratio=spread / expected if expected > 0 else 1.0,
        lag1=lag1,
        blocks_per_batch=float(np.mean(distinct)),
        fetches_per_block=cache.fetches / max(1, len(cache.seen)),
        batches=num_batches,
    )


def _chi2(ids: Ids, count: int) -> float:
    """Per degree of freedom, of equal classes of the samples' numbers, as against drawing without putting back."""
    labels = ids * CLASSES // count
    found = np.bincount(labels, minlength=CLASSES)
    edges = -(-np.arange(CLASSES + 1) * count // CLASSES)
    expected = np.diff(edges) * (len(ids) / count)
    drawn = 1 - (len(ids) - 1) / max(1, count - 1)
    return float(((found - expected) ** 2 / expected).sum() / (CLASSES - 1) / max(drawn, 1e-9))


class _Cache:
    """Counts what a cache of blocks fetches, that drops the block which was used longest ago."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.fetches = 0
        self.seen: set[int] = set()

    def read(self, blocks: Ids) -> None:
        """A batch asks for these blocks, sample by sample."""
        for block in blocks.tolist():
            if block in self._kept:
                self._kept.move_to_end(block)
                continue
            self.fetches += 1
            self.seen.add(block)
            self._kept[block] = None
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
