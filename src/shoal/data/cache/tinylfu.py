"""W-TinyLFU (Einziger, Friedman and Manes, 2017): a key is let into the main queue when it is asked for more often than the one
that would have to leave for it.
"""

from shoal.data.cache.frequency import Frequencies
from shoal.data.cache.policy import HIT, Access, Key, SizedQueue


class TinyLfu:
    """A window of a hundredth by recency, before a main part of which four fifths are for keys that were hit there."""

    def __init__(self, capacity: int, *, num_keys: int | None = None) -> None:
        """``num_keys``: about how many keys fit, where sizes are not 1."""
        self.capacity = capacity
        self._window_size = max(1, capacity // 100)
        self._main_size = capacity - self._window_size
        self._window, self._trial, self._kept = SizedQueue(), SizedQueue(), SizedQueue()
        self._counts = Frequencies(10 * (num_keys or capacity))

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""
        return self._window.total + self._trial.total + self._kept.total

    def __contains__(self, key: Key) -> bool:
        return key in self._window or key in self._trial or key in self._kept

    def access(self, key: Key, size: int = 1) -> Access:
        """A new key enters the window; what leaves the window is compared with what would leave the main part."""
        self._counts.touch(key)
        if key in self._window:
            self._window.refresh(key)
            return HIT
        if key in self._kept:
            self._kept.refresh(key)
            return HIT
        if key in self._trial:
            self._kept.push(key, self._trial.remove(key))
            while self._kept.total > self._main_size * 4 // 5:
                self._trial.push(*self._kept.pop_oldest())
            return HIT
        if size > self.capacity:
            return Access(False, (key,))
        evicted: list[Key] = []
        self._window.push(key, size)
        while self._window.total > self._window_size:
            evicted += self._leave_window(*self._window.pop_oldest())
        return Access(False, tuple(evicted))

    def discard(self, key: Key) -> None:
        """The key's content was lost."""
        for queue in (self._window, self._trial, self._kept):
            queue.remove(key)

    def _leave_window(self, key: Key, size: int) -> list[Key]:
        if size > self._main_size:
            return [key]
        evicted: list[Key] = []
        while self._trial.total + self._kept.total + size > self._main_size:
            queue = self._trial if len(self._trial) else self._kept
            if self._counts[key] <= self._counts[queue.oldest()]:
                return [*evicted, key]
            evicted.append(queue.pop_oldest()[0])
        self._trial.push(key, size)
        return evicted
