"""LRU and MRU: the key that was used longest ago leaves, or the one that was used last.

MRU is right for an epoch: what has just been used comes again only after everything else. LRU is right for skewed keys.
"""

from shoal.data.cache.policy import HIT, Access, Key, SizedQueue


class Lru:
    """The key whose last use is longest ago leaves first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._queue = SizedQueue()

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""
        return self._queue.total

    def __contains__(self, key: Key) -> bool:
        return key in self._queue

    def access(self, key: Key, size: int = 1) -> Access:
        """The key becomes the newest."""
        if key in self._queue:
            self._queue.refresh(key)
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        evicted = []
        while self._queue.total + size > self.capacity:
            evicted.append(self._queue.pop_oldest()[0])
        self._queue.push(key, size)
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self._queue.remove(key)


class Mru:
    """The key that was used last leaves first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._queue = SizedQueue()

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""
        return self._queue.total

    def __contains__(self, key: Key) -> bool:
        return key in self._queue

    def access(self, key: Key, size: int = 1) -> Access:
        """The key becomes the newest, in the place of the newest so far where there is no room."""
        if key in self._queue:
            self._queue.refresh(key)
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        evicted = []
        while self._queue.total + size > self.capacity:
            evicted.append(self._queue.pop_newest()[0])
        self._queue.push(key, size)
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self._queue.remove(key)
