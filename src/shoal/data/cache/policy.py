"""The interface of an eviction policy, and the queue of keys with sizes that most of them are made of.

A policy decides and holds no content: it is told of every access and answers which keys have to go. It uses no clock and no
random numbers, so an access trace has one outcome. ``cachetools`` ties policy and content together and has neither MRU nor any
policy that resists scans; those with sizes in bytes, ghosts and a plan are written here, each in a file of its own.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Key = Hashable


@dataclass(frozen=True, slots=True)
class Access:
    """What an access led to."""

    hit: bool
    """True where the key was in the cache."""
    evicted: tuple[Key, ...] = ()
    """Keys that have to leave the cache now; the accessed key itself where it is not let in."""


HIT = Access(True)


class Policy(Protocol):
    """Decides which keys stay within ``capacity``, in whatever unit the sizes are."""

    @property
    def capacity(self) -> int:
        """Sum of sizes that fits."""

    @property
    def used(self) -> int:
        """Sum of the sizes of the keys that are in."""

    def access(self, key: Key, size: int = 1) -> Access:
        """The key is asked for: a hit, or it comes in and others leave."""

    def discard(self, key: Key) -> None:
        """The key's content was lost; nothing happens where the key is not in."""

    def __contains__(self, key: Key) -> bool:
        """True where the key is in."""


@runtime_checkable
class Plannable(Policy, Protocol):
    """A policy that can be told what comes next."""

    def plan(self, keys: Sequence[Key]) -> None:
        """These are the next accesses after those that are known already."""

    def forget_plan(self) -> None:
        """What was planned does not happen."""


class SizedQueue:
    """Keys in order with their sizes, and the sum of these."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self.total = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sizes)

    def push(self, key: Key, size: int) -> None:
        """Put a new key at the newest end."""
        self._sizes[key] = size
        self.total += size

    def refresh(self, key: Key) -> None:
        """Move a key to the newest end."""
        self._sizes.move_to_end(key)

    def pop_oldest(self) -> tuple[Key, int]:
        """Take the key at the oldest end out."""
        key, size = self._sizes.popitem(last=False)
        self.total -= size
        return key, size

    def pop_newest(self) -> tuple[Key, int]:
        """Take the key at the newest end out."""
        key, size = self._sizes.popitem(last=True)
        self.total -= size
        return key, size

    def oldest(self) -> Key:
        """The key at the oldest end."""
        return next(iter(self._sizes))

    def remove(self, key: Key) -> int:
        """Take a key out; its size, 0 where it is not in."""
        size = self._sizes.pop(key, 0)
        self.total -= size
        return size
