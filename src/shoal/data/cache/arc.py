"""ARC (Megiddo and Modha, FAST 2003): keys used once and keys used again share the room by what their ghosts would have hit."""

from shoal.data.cache.policy import HIT, Access, Key, SizedQueue


class Arc:
    """Two queues by recency and two of ghosts; ``_target`` is the share of the keys used once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._once, self._again = SizedQueue(), SizedQueue()
        self._once_ghosts, self._again_ghosts = SizedQueue(), SizedQueue()
        self._target = 0.0

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""
        return self._once.total + self._again.total

    def __contains__(self, key: Key) -> bool:
        return key in self._once or key in self._again

    def access(self, key: Key, size: int = 1) -> Access:
        """A second use moves a key to those used again; a hit among the ghosts moves the target."""
        if key in self._again:
            self._again.refresh(key)
            return HIT
        if key in self._once:
            self._again.push(key, self._once.remove(key))
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        ghosts_once, ghosts_again = self._once_ghosts.total, self._again_ghosts.total
        if key in self._once_ghosts:
            self._target = min(self.capacity, self._target + size * max(1.0, ghosts_again / max(1, ghosts_once)))
            evicted = self._make_room(size, from_again_ghosts=False)
            self._once_ghosts.remove(key)
            self._again.push(key, size)
        elif key in self._again_ghosts:
            self._target = max(0.0, self._target - size * max(1.0, ghosts_once / max(1, ghosts_again)))
            evicted = self._make_room(size, from_again_ghosts=True)
            self._again_ghosts.remove(key)
            self._again.push(key, size)
        else:
            evicted = self._enter(size)
            self._once.push(key, size)
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        self._once.remove(key)
        self._again.remove(key)

    def _enter(self, size: int) -> list[Key]:
        """Room for a key that neither the queues nor the ghosts know: case IV of the paper."""
        evicted: list[Key] = []
        if self._once.total + self._once_ghosts.total + size > self.capacity:
            if len(self._once_ghosts):
                while len(self._once_ghosts) and self._once.total + self._once_ghosts.total + size > self.capacity:
                    self._once_ghosts.pop_oldest()
            else:
                while len(self._once) and self.used + size > self.capacity:
                    evicted.append(self._once.pop_oldest()[0])
        total = self.used + self._once_ghosts.total + self._again_ghosts.total
        while len(self._again_ghosts) and total + size > 2 * self.capacity:
            total -= self._again_ghosts.pop_oldest()[1]
        return evicted + self._make_room(size, from_again_ghosts=False)

    def _make_room(self, size: int, *, from_again_ghosts: bool) -> list[Key]:
        evicted = []
        while self.used + size > self.capacity:
            over = self._once.total > self._target or (from_again_ghosts and self._once.total >= self._target)
            if len(self._once) and (over or not len(self._again)):
                key, held = self._once.pop_oldest()
                self._once_ghosts.push(key, held)
            else:
                key, held = self._again.pop_oldest()
                self._again_ghosts.push(key, held)
            evicted.append(key)
        return evicted
