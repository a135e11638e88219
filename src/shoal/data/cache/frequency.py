"""How often keys were asked for lately, whether they are in a cache or not: the counts that admission decides by.

Counts are exact and halved after so many touches, so what was popular yesterday fades; a key whose count has become 0 is
forgotten, which bounds the memory. The sketch of the TinyLFU paper estimates the same in less memory, for caches of millions
of small keys; blocks are large and few.
"""

from shoal.data.cache.policy import Key

_MOST = 15
"""Counts end here, as in the paper's four bits."""


class Frequencies:
    """Counts of the last touches; ``period`` touches make them half."""

    def __init__(self, period: int) -> None:
        self._period = max(1, period)
        self._touches = 0
        self._counts: dict[Key, int] = {}

    def touch(self, key: Key) -> None:
        """The key is asked for."""
        self._counts[key] = min(_MOST, self._counts.get(key, 0) + 1)
        self._touches += 1
        if self._touches >= self._period:
            self._touches = 0
            self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}

    def __getitem__(self, key: Key) -> int:
        """How often the key was asked for lately."""
        return self._counts.get(key, 0)
