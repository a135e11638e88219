"""LRU and MRU in one cache: which end of the queue a key leaves from is decided by two small caches that play both rules.

The keys of a sample, chosen by hash, drive two shadow caches of the same share of the capacity, one under each rule; a counter
adds what the one hits and subtracts what the other hits, and its sign says which rule holds (set duelling, as in Qureshi and
others, ISCA 2007). Plain MRU throws away what was just hit, which loses keys that are asked for often as soon as a scan passes;
so under its rule the newest key that was *not hit since it came in* leaves. For epochs that is the same, since nothing comes
twice in one, and a scan through skewed keys then costs next to nothing.
"""

import zlib

from shoal.data.cache.policy import HIT, Access, Key, SizedQueue
from shoal.data.cache.recency import Lru

_MOST = 64
"""The counter's range: how much past it takes to change the rule."""
_SHADOW = 1024
"""About how many keys a shadow cache holds: smaller ones were measured to choose wrongly, a tenth of the hits of shuffled epochs
were lost with 31. A cache of fewer keys is shadowed in full, which costs the memory of two more queues of keys."""


class Guarded:
    """MRU that keeps what was hit: the newest key without a hit leaves, and the newest of all where each has had one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._fresh, self._hit = SizedQueue(), SizedQueue()

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""
        return self._fresh.total + self._hit.total

    def __contains__(self, key: Key) -> bool:
        return key in self._fresh or key in self._hit

    def access(self, key: Key, size: int = 1) -> Access:
        """A key that is hit is kept before those that were not."""
        if key in self._hit:
            self._hit.refresh(key)
            return HIT
        if key in self._fresh:
            self._hit.push(key, self._fresh.remove(key))
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        evicted = []
        while self.used + size > self.capacity:
            evicted.append((self._fresh if len(self._fresh) else self._hit).pop_newest()[0])
        self._fresh.push(key, size)
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self._fresh.remove(key)
        self._hit.remove(key)


class Blend:
    """One queue by recency; the duel says from which end a key leaves."""

    def __init__(self, capacity: int, *, num_keys: int | None = None) -> None:
        """``num_keys``: about how many keys fit, where sizes are not 1."""
        self.capacity = capacity
        self._sample = max(1, (num_keys or capacity) // _SHADOW)
        share = max(1, capacity // self._sample)
        self._lru, self._guarded = Lru(share), Guarded(share)
        self._balance = 0
        self._queue = SizedQueue()
        self._fresh = SizedQueue()

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""
        return self._queue.total

    def __contains__(self, key: Key) -> bool:
        return key in self._queue

    def access(self, key: Key, size: int = 1) -> Access:
        """The key becomes the newest; a miss evicts by the rule that is ahead."""
        if self._sample == 1 or zlib.crc32(repr(key).encode()) % self._sample == 0:
            ahead = self._guarded.access(key, size).hit - self._lru.access(key, size).hit
            self._balance = max(-_MOST, min(_MOST, self._balance + ahead))
        if key in self._queue:
            self._queue.refresh(key)
            self._fresh.remove(key)
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        evicted = []
        while self._queue.total + size > self.capacity:
            evicted.append(self._evict())
        self._queue.push(key, size)
        self._fresh.push(key, size)
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self._queue.remove(key)
        self._fresh.remove(key)

    def _evict(self) -> Key:
        if self._balance <= 0:
            key, _ = self._queue.pop_oldest()
            self._fresh.remove(key)
        elif len(self._fresh):
            key, _ = self._fresh.pop_newest()
            self._queue.remove(key)
        else:
            key, _ = self._queue.pop_newest()
        return key
