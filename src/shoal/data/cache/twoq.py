"""2Q (Johnson and Shasha, VLDB 1994): a key is kept for long only when it comes again after it has left a short queue."""

from shoal.data.cache.policy import HIT, Access, Key, SizedQueue


class TwoQ:
    """A first-in first-out queue of a quarter, ghosts of half the capacity, and a main queue by recency."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._first, self._ghosts, self._main = SizedQueue(), SizedQueue(), SizedQueue()

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""
        return self._first.total + self._main.total

    def __contains__(self, key: Key) -> bool:
        return key in self._first or key in self._main

    def access(self, key: Key, size: int = 1) -> Access:
        """A new key enters the short queue, one that has left it enters the main queue."""
        if key in self._main:
            self._main.refresh(key)
            return HIT
        if key in self._first:
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        was_here = self._ghosts.remove(key) > 0
        evicted = []
        while self.used + size > self.capacity:
            evicted.append(self._evict())
        (self._main if was_here else self._first).push(key, size)
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self._first.remove(key)
        self._main.remove(key)

    def _evict(self) -> Key:
        if self._first.total > self.capacity // 4 or not len(self._main):
            key, size = self._first.pop_oldest()
            self._ghosts.push(key, size)
            while self._ghosts.total > self.capacity // 2:
                self._ghosts.pop_oldest()
            return key
        return self._main.pop_oldest()[0]
