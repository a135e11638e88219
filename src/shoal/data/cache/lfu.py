"""LFU: the key that was used least often leaves; of several, the one whose last use is longest ago. Counts go with the key."""

import heapq

from shoal.data.cache.policy import HIT, Access, Key


class Lfu:
    """Evicts by count of uses, then by age."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._now = 0
        self._state: dict[Key, tuple[int, int, int]] = {}  # count, last use, size
        self._heap: list[tuple[int, int, Key]] = []  # what is no longer in ``_state`` like this is skipped

    def __contains__(self, key: Key) -> bool:
        return key in self._state

    def access(self, key: Key, size: int = 1) -> Access:
        """The key's count grows by one."""
        self._now += 1
        if key in self._state:
            count, _, size = self._state[key]
            self._note(key, count + 1, size)
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        evicted = []
        while self.used + size > self.capacity:
            count, last, victim = heapq.heappop(self._heap)
            if self._state.get(victim, (0, 0, 0))[:2] == (count, last):
                self.discard(victim)
                evicted.append(victim)
        self.used += size
        self._note(key, 1, size)
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost, and with it its count."""
        self.used -= self._state.pop(key, (0, 0, 0))[2]

    def _note(self, key: Key, count: int, size: int) -> None:
        self._state[key] = (count, self._now, size)
        # Times differ, so two entries are never compared by their keys.
        heapq.heappush(self._heap, (count, self._now, key))
        if len(self._heap) > 4 * len(self._state) + 64:
            self._heap = [(uses, last, each) for each, (uses, last, _) in self._state.items()]
            heapq.heapify(self._heap)
