"""Eviction by a plan: the key whose next use is farthest away leaves (Belady 1966), as far as the order is known, and by recency
where it is not.

The order of an epoch is a pure function, so a loader knows what comes thousands of accesses ahead; no other policy can do better
with that knowledge. A key that comes later than all that are in is not let in at all.
"""

import heapq
from collections import deque
from collections.abc import Sequence

from shoal.data.cache.policy import HIT, Access, Key

_NEVER = float("inf")
_LATE = 256
"""A planned use that is so far behind the farthest that has happened does not happen here: another tier had the key."""


class Planned:
    """Belady's rule inside the plan, LRU outside it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._known = 0
        self._uses: dict[Key, deque[int]] = {}
        self._order: deque[tuple[int, Key]] = deque()
        self._farthest_done = -1
        self._now = 0
        self._state: dict[Key, tuple[float, int, int]] = {}  # next use, last use, size
        self._heap: list[tuple[float, int, Key]] = []  # farthest next use first, then longest unused

    def __contains__(self, key: Key) -> bool:
        return key in self._state

    def plan(self, keys: Sequence[Key]) -> None:
        """These are the next accesses after those that are known already."""
        for key in keys:
            uses = self._uses.setdefault(key, deque())
            uses.append(self._known)
            self._order.append((self._known, key))
            if key in self._state and self._state[key][0] == _NEVER:
                _, last, size = self._state[key]
                self._note(key, self._known, last, size)
            self._known += 1

    def forget_plan(self) -> None:
        """What was planned does not happen: the order goes on from another position, or among other ranks."""
        self._uses.clear()
        self._order.clear()
        for key, (_, last, size) in list(self._state.items()):
            self._note(key, _NEVER, last, size)

    def access(self, key: Key, size: int = 1) -> Access:
        """The key's next use in the plan becomes the one after this."""
        self._now += 1
        uses = self._uses.get(key)
        if uses:
            self._farthest_done = max(self._farthest_done, uses.popleft())
            if not uses:
                del self._uses[key]
            self._drop_late()
            uses = self._uses.get(key)
        upcoming = float(uses[0]) if uses else _NEVER
        if key in self._state:
            self._note(key, upcoming, self._now, self._state[key][2])
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        evicted: list[Key] = []
        while self.used + size > self.capacity:
            victim = self._farthest()
            # Where nothing is known of either the newer one stays, as under LRU.
            if upcoming >= self._state[victim][0] != _NEVER:
                return Access(False, (*evicted, key))
            self.discard(victim)
            evicted.append(victim)
        self.used += size
        self._note(key, upcoming, self._now, size)
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self.used -= self._state.pop(key, (0.0, 0, 0))[2]

    def _drop_late(self) -> None:
        while self._order and self._order[0][0] < self._farthest_done - _LATE:
            at, key = self._order.popleft()
            uses = self._uses.get(key)
            if not uses or uses[0] != at:
                continue
            uses.popleft()
            if key in self._state:
                _, last, size = self._state[key]
                self._note(key, float(uses[0]) if uses else _NEVER, last, size)
            if not uses:
                del self._uses[key]

    def _farthest(self) -> Key:
        while True:
            upcoming, last, key = self._heap[0]
            if self._state.get(key, (None, None))[:2] == (-upcoming, last):
                return key
            heapq.heappop(self._heap)

    def _note(self, key: Key, upcoming: float, last: int, size: int) -> None:
        self._state[key] = (upcoming, last, size)
        heapq.heappush(self._heap, (-upcoming, last, key))
        if len(self._heap) > 4 * len(self._state) + 64:
            self._heap = [(-far, used, each) for each, (far, used, _) in self._state.items()]
            heapq.heapify(self._heap)
