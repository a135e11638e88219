"""A batch in small work units, handed to whoever is free, the last of them twice; each counted once.

A batch that is cut into one part per worker takes as long as its slowest worker. Cut into work units that are much smaller, a
slow worker gets fewer of them; and when none is left, the ones that have been out longest are given out again to those who are
idle, and whoever comes first counts (backup tasks: Dean et al., Large Scale Distributed Deep Networks, 2012, section 4.2).

Who computes what, and who comes first, is chance; the sum must not be. So results are added in the order of the work units
(``InOrder``), which gives the bits of one process that goes through them in turn: the losses at the coordinator, and at each
shard its part of the gradient (``vectors.py``). No torch: the center imports this.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Generic, TypeVar

from shoal.core.errors import RequestError
from shoal.paramserver.log.queue import WorkQueue

T = TypeVar("T")

PER_WORKER = 8
"""Work units that each worker would get if all were equally fast."""


def cut_batch(num_samples: int, num_workers: int, *, per_worker: int = PER_WORKER) -> tuple[range, ...]:
    """The samples of each work unit of a batch, in order; their numbers differ by at most one.

    The cut depends on the plan's number of workers, and not on how many are alive: it decides the order of the sum.

    Raises:
        RequestError: there is nothing to cut, or nobody to work.
    """
    if num_samples < 1 or num_workers < 1 or per_worker < 1:
        raise RequestError(
            f"a batch of {num_samples} samples for {num_workers} workers with {per_worker} work units each cannot be cut; "
            "each must be at least 1"
        )
    count = min(num_samples, num_workers * per_worker)
    bounds = [num_samples * place // count for place in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


class BatchQueue:
    """Who computes which work unit of one evaluation: a work queue of one step, whose slow units are given out twice in the end.

    It is told what happens and by which clock; it waits for nothing itself.
    """

    def __init__(self, num_units: int, *, max_copies: int = 2) -> None:
        """Begin with every work unit to do.

        Args:
            num_units: of the batch.
            max_copies: workers that may compute one work unit at the same time.

        Raises:
            RequestError: a number is below 1.
        """
        if min(num_units, max_copies) < 1:
            raise RequestError(f"{num_units} work units in {max_copies} copies: there must be at least 1 of each")
        self._queue = WorkQueue(workers=num_units, steps=1)
        self._num_units, self._max_copies = num_units, max_copies
        self._num_begun = 0
        """No work unit from here on was ever given out."""
        self.num_backups = 0
        """Work units given out a second time."""

    @property
    def is_done(self) -> bool:
        """True when every work unit has been counted."""
        return self._queue.is_over

    def take(self, worker: str, now: float) -> int | None:
        """The work unit that a free worker computes next; None when there is none for it now.

        Args:
            worker: who asks. It may ask for several, and works on all of them.
            now: by any clock that does not go back.
        """
        if self._queue.next_step is not None:
            # The earliest first: results behind it are being kept for its sake.
            unit = self._queue.give(worker, 0, now)
            assert unit is not None, "nothing is reserved here"
            self._num_begun = max(self._num_begun, unit + 1)
            return unit
        holders = {unit: self._queue.holders(unit) for unit in self._queue.in_hand()}
        slow = [
            (min(workers.values()), unit)
            for unit, workers in holders.items()
            if worker not in workers and len(workers) < self._max_copies
        ]
        if not slow:
            return None
        _, unit = min(slow)
        self._queue.share(worker, unit, now)
        self.num_backups += 1
        return unit

    def finish(self, worker: str, unit: int) -> bool:
        """Take note of a result; True when it is the one that counts.

        A worker that was given up may still bring one; it is as good as any.

        Raises:
            RequestError: there is no such work unit, or it was never given to anybody.
        """
        if not 0 <= unit < self._num_units:
            raise RequestError(f"{worker} computed work unit {unit} of a batch of {self._num_units}")
        if unit >= self._num_begun:
            raise RequestError(f"{worker} computed work unit {unit}, which nobody was asked for")
        if self._queue.is_done(unit):
            return False
        self._queue.finish(unit)
        return True

    def lose(self, worker: str) -> tuple[int, ...]:
        """A worker is gone: what only it computed is to do again. Returns those work units."""
        return self._queue.release(worker, self._queue.held_by(worker))


class InOrder(Generic[T]):
    """Results let through in the order of their work units, each once, however they come."""

    def __init__(self, num_units: int) -> None:
        """Begin with none."""
        self._num_units = num_units
        self._next = 0
        self._early: dict[int, T] = {}

    @property
    def is_done(self) -> bool:
        """True when the last one has been let through."""
        return self._next == self._num_units

    @property
    def num_kept(self) -> int:
        """Results that wait for an earlier one."""
        return len(self._early)

    @property
    def num_units(self) -> int:
        """Of the batch."""
        return self._num_units

    @property
    def num_through(self) -> int:
        """Results that were let through."""
        return self._next

    @property
    def kept(self) -> Mapping[int, T]:
        """What waits, by work unit."""
        return self._early

    @classmethod
    def restore(cls, num_units: int, num_through: int, kept: Mapping[int, T]) -> "InOrder[T]":
        """One that is as another was."""
        made: InOrder[T] = cls(num_units)
        made._next, made._early = num_through, dict(kept)
        return made

    def is_wanted(self, unit: int) -> bool:
        """True for a work unit that was not offered before.

        Raises:
            RequestError: there is no such work unit.
        """
        if not 0 <= unit < self._num_units:
            raise RequestError(f"a result of work unit {unit} of a batch of {self._num_units}")
        return unit >= self._next and unit not in self._early

    def offer(self, unit: int, result: T) -> list[T]:
        """Let through what can be added now, in order; nothing for a work unit that was offered before.

        Raises:
            RequestError: there is no such work unit.
        """
        if self.is_wanted(unit):
            self._early[unit] = result
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready
