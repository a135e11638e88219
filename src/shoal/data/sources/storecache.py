"""The cache of a store on another machine: its blocks as keys, and what a loader reads next told to the cache."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.events import DataCache
from shoal.data.store.blocks import Blocks
from shoal.data.store.folder import BLOCKS, StoreFolder, block_name
from shoal.data.tiers.cache import BlockCache
from shoal.data.tiers.config import CacheConfig
from shoal.data.tiers.key import BlockKey


class StoreCache:
    """Blocks of one store, near."""

    def __init__(self, folder: StoreFolder, config: CacheConfig) -> None:
        self._folder = folder
        self._cache = BlockCache(config)

    def fetch(self, path: str, num_bytes: int, digest: str) -> memoryview:
        """A block, from the nearest tier that has it."""
        storage = self._folder.storage
        return memoryview(self._cache.get(self._key(path, num_bytes, digest), lambda: storage.read(path, 0, num_bytes)))

    def plan(self, blocks: Blocks, own: Sequence[NDArray[np.int64]], everyone: Sequence[NDArray[np.int64]]) -> int:
        """The numbers of the blocks that this rank reads next, read by read, and that all ranks do; how many this rank does."""
        mine = self._keys(blocks, own)
        self._cache.plan(mine)
        self._cache.plan_host(self._keys(blocks, everyone))
        return len(mine)

    def report(self) -> DataCache:
        """What the cache has done since the last report."""
        return self._cache.report()

    def _keys(self, blocks: Blocks, reads: Sequence[NDArray[np.int64]]) -> list[BlockKey]:
        # A read opens each of its blocks once, in the order of their numbers.
        refs = [blocks.ref(int(number)) for read in reads for number in np.unique(read)]
        return [self._key(self._folder.path(BLOCKS, block_name(ref.digest)), ref.num_bytes, ref.digest) for ref in refs]

    def _key(self, path: str, num_bytes: int, digest: str) -> BlockKey:
        return BlockKey(address=self._folder.storage.address, path=path, end=num_bytes, digest=digest)
