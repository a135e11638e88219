"""A storage whose reads go through a cache: for readers of formats that ask for ranges and know of no blocks."""

from collections.abc import Iterator

from shoal.data.storage.protocol import Entry, Storage
from shoal.data.tiers.cache import BlockCache
from shoal.data.tiers.key import BlockKey


class CachedStorage:
    """Reads what a storage has through a cache; all else goes to the storage itself.

    A file's version is asked for once: a run reads what was there when it began.
    """

    def __init__(self, storage: Storage, cache: BlockCache) -> None:
        self._storage, self._cache = storage, cache
        self._entries: dict[str, Entry] = {}

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
        key = BlockKey(address=self.address, path=path, start=start, end=end, version=self.stat(path).version)
        return self._cache.get(key, lambda: self._storage.read(path, start, end))

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

    def delete(self, path: str) -> None:
        """Delete a file of the storage."""
        self._storage.delete(path)
        self._entries.pop(path, None)
