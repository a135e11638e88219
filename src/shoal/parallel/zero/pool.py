"""Which buffer a gathered unit takes: the policy alone, without memory, so that a plan's traffic can be worked out beforehand.

A unit that is let go stays where it was until its buffer is wanted, and taking it again is then free: the last block and the
output layer, which the backward pass wants first, are not gathered twice, and neither is an embedding tied to the output layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Buffer:
    capacity: int
    occupant: int | None = None
    is_taken: bool = False


class Pool:
    """Buffers of a few sizes, made when they are first needed and never given back. Every rank makes the same choices."""

    def __init__(self, capacities: Sequence[int]) -> None:
        """``capacities`` says for each unit the size of the buffer that it takes."""
        self._capacities = capacities
        # Least recently let go first: what is wanted again soonest is what was let go last.
        self._buffers: dict[int, _Buffer] = {}

    @property
    def sizes(self) -> list[int]:
        """Elements of every buffer made so far, in the order in which they were made."""
        return [self._buffers[index].capacity for index in sorted(self._buffers)]

    def take(self, unit: int) -> tuple[int, bool]:
        """The buffer that holds the unit from now on, and whether its contents are already there."""
        capacity, free = self._capacities[unit], None
        for index, buffer in self._buffers.items():
            if buffer.occupant == unit:
                assert not buffer.is_taken
                buffer.is_taken = True
                return index, True
            if free is None and not buffer.is_taken and buffer.capacity == capacity:
                free = index
        if free is None:
            free = len(self._buffers)
            self._buffers[free] = _Buffer(capacity=capacity)
        buffer = self._buffers[free]
        buffer.occupant, buffer.is_taken = unit, True
        return free, False

    def let_go(self, index: int) -> None:
        """The buffer may be taken by another unit now."""
        buffer = self._buffers.pop(index)
        buffer.is_taken = False
        self._buffers[index] = buffer

    def occupant(self, index: int) -> int | None:
        """The unit whose contents are in the buffer."""
        return self._buffers[index].occupant

    def forget(self) -> None:
        """The weights have changed: nothing in the buffers is worth keeping, except in those that are taken."""
        for buffer in self._buffers.values():
            if not buffer.is_taken:
                buffer.occupant = None
