"""A storage whose reads go through a cache: for readers of formats that ask for ranges and know of no blocks.

A file is cached in blocks of one size from its beginning, so a range that another reader asked for in other steps is near too. A
file whose storage says no version is read past the cache: a disk that outlives the run could not tell the old one from a new one.
"""

from collections.abc import Iterable, Iterator

from shoal.data.storage.protocol import Entry, Storage
from shoal.data.tiers.cache import BlockCache
from shoal.data.tiers.key import BlockKey


class CachedStorage:
    """Reads what a storage has through a cache; all else goes to the storage itself.

    A file's version is asked for once: a run reads what was there when it began.

    Args:
        storage: where a block comes from that no tier has.
        cache: of the blocks.
        known: files whose size and version were asked for already.
    """

    def __init__(self, storage: Storage, cache: BlockCache, known: Iterable[Entry] = ()) -> None:
        self._storage, self._cache = storage, cache
        self._entries = {entry.path: entry for entry in known}
        # Of the block that was read last, which a reader in small steps asks for again and again.
        self._last: tuple[BlockKey, bytes] | None = None

    @property
    def address(self) -> str:
        """Of the storage."""
        return self._storage.address

    def stat(self, path: str) -> Entry:
        """Size and version, as they were when they were first asked for."""
        if path not in self._entries:
            self._entries[path] = self._storage.stat(path)
        return self._entries[path]

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly these bytes, from the nearest tier that has them."""
        entry = self.stat(path)
        until = entry.size if end is None else end
        if not entry.version or not 0 <= start < until <= entry.size:
            return self._storage.read(path, start, end)
        size = self._cache.block_bytes
        pieces = []
        for first in range(start - start % size, until, size):
            block = self._block(entry, first, min(first + size, entry.size))
            pieces.append(block[max(0, start - first) : until - first])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _block(self, entry: Entry, start: int, end: int) -> bytes:
        key = BlockKey(address=self.address, path=entry.path, start=start, end=end, version=entry.version)
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        content = self._cache.get(key, lambda: self._storage.read(entry.path, start, end))
        self._last = (key, content)
        return content

    def list(self, folder: str) -> Iterator[Entry]:
        """What the storage lists; sizes and versions are kept."""
        for entry in self._storage.list(folder):
            self._entries.setdefault(entry.path, entry)
            yield entry

    def create(self, path: str, content: bytes) -> None:
        """Write a new file to the storage."""
        self._storage.create(path, content)

    def replace(self, path: str, content: bytes) -> None:
        """Write a file to the storage; what is known of the old one is forgotten."""
        self._storage.replace(path, content)
        self._entries.pop(path, None)
        self._last = None

    def delete(self, path: str) -> None:
        """Delete a file of the storage."""
        self._storage.delete(path)
        self._entries.pop(path, None)
