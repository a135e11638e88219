"""S3-FIFO (Yang and others, SOSP 2023): three first-in first-out queues. Most keys are asked for once and leave after a tenth of
the cache has passed; those that were hit twice by then move to the main queue, where a hit buys another round.
"""

from shoal.data.cache.policy import HIT, Access, Key, SizedQueue

_MOST = 3
_PROMOTE = 2


class S3Fifo:
    """A small queue of a tenth, a main queue, and ghosts as many as the main queue holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._small_size = max(1, capacity // 10)
        self._small, self._main, self._ghosts = SizedQueue(), SizedQueue(), SizedQueue()
        self._uses: dict[Key, int] = {}

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""
        return self._small.total + self._main.total

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def access(self, key: Key, size: int = 1) -> Access:
        """A hit is counted, up to three; a key that left lately enters the main queue, any other the small one."""
        if key in self._uses:
            self._uses[key] = min(_MOST, self._uses[key] + 1)
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        was_here = self._ghosts.remove(key) > 0
        evicted: list[Key] = []
        while self.used + size > self.capacity:
            evicted += (
                self._evict_small()
                if self._small.total > self._small_size or not len(self._main)
                else self._evict_main()
            )
        (self._main if was_here else self._small).push(key, size)
        self._uses[key] = 0
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self._small.remove(key)
        self._main.remove(key)
        self._uses.pop(key, None)

    def _evict_small(self) -> list[Key]:
        key, size = self._small.pop_oldest()
        if self._uses[key] >= _PROMOTE:
            self._uses[key] = 0
            self._main.push(key, size)
            return []
        del self._uses[key]
        self._ghosts.push(key, size)
        while self._ghosts.total > self.capacity - self._small_size:
            self._ghosts.pop_oldest()
        return [key]

    def _evict_main(self) -> list[Key]:
        while True:
            key, size = self._main.pop_oldest()
            if not self._uses[key]:
                del self._uses[key]
                return [key]
            self._uses[key] -= 1
            self._main.push(key, size)
