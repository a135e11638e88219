"""The queue of portions: todo, doing, done. A portion is in exactly one of the three, so none can be lost.

Steps are opened one after the other, so the queue holds what is in hand and not the whole run. Done is what was opened and is
neither todo nor doing; a dead worker's portions go back to where they were in the order, which is the front.
"""

import bisect
from collections.abc import Mapping
from typing import Any


class Portions:
    """Who does what. Plain state, no clock: times are what the caller says."""

    def __init__(self, *, workers: int, steps: int) -> None:
        self.workers = workers
        self.steps = steps
        self._opened = 0
        self._todo: list[int] = []
        self._doing: dict[int, dict[str, float]] = {}

    @property
    def is_over(self) -> bool:
        """True when every portion of every step is done."""
        return self._opened == self.steps and not self._todo and not self._doing

    @property
    def num_done(self) -> int:
        """Portions that are done."""
        return self._opened * self.workers - len(self._todo) - len(self._doing)

    @property
    def next_step(self) -> int | None:
        """Step of the first portion that nobody does; None when there is none left."""
        if self._todo:
            return self._todo[0] // self.workers
        return self._opened if self._opened < self.steps else None

    def give(self, worker: str, index: int, now: float) -> int:
        """Hand out a portion of ``next_step``: the worker's own share where it is free, else the first."""
        step = self.next_step
        assert step is not None, "no portion left to give"
        if not self._todo:
            self._todo = list(range(step * self.workers, (step + 1) * self.workers))
            self._opened += 1
        own = step * self.workers + index % self.workers
        portion = own if own in self._todo else self._todo[0]
        self._todo.remove(portion)
        self._doing[portion] = {worker: now}
        return portion

    def pass_over(self) -> None:
        """The next step is done by others than workers: none of its portions is given to anyone."""
        assert not self._todo and not self._doing, "portions of an earlier step are still to do"
        self._opened += 1

    def share(self, worker: str, portion: int, now: float) -> None:
        """Hand a portion that another does to this worker as well; the first to commit it wins."""
        self._doing[portion][worker] = now

    def is_done(self, portion: int) -> bool:
        """True when its gradient is committed."""
        return portion < self._opened * self.workers and portion not in self._todo and portion not in self._doing

    def holders(self, portion: int) -> Mapping[str, float]:
        """The workers that do a portion, each with the time it took it."""
        return self._doing.get(portion, {})

    def held_by(self, worker: str) -> list[int]:
        """The portions that a worker does, in order."""
        return sorted(portion for portion, holders in self._doing.items() if worker in holders)

    def in_hand(self) -> list[int]:
        """Every portion that somebody does, in order."""
        return sorted(self._doing)

    def finish(self, portion: int) -> None:
        """A portion is done, for all who do it."""
        del self._doing[portion]

    def release(self, worker: str, portions: list[int]) -> tuple[int, ...]:
        """A worker gives portions up; those that nobody else does are todo again and are returned."""
        freed = []
        for portion in portions:
            holders = self._doing[portion]
            del holders[worker]
            if not holders:
                del self._doing[portion]
                bisect.insort(self._todo, portion)
                freed.append(portion)
        return tuple(freed)

    def reopen(self, portion: int) -> None:
        """A portion that was done is todo again: its gradient was lost before it was used."""
        assert self.is_done(portion), f"portion {portion} is not done"
        bisect.insort(self._todo, portion)

    def rebase(self, now: float) -> None:
        """All were taken now: for a keeper with another clock."""
        self._doing = {portion: dict.fromkeys(holders, now) for portion, holders in self._doing.items()}

    def export(self) -> dict[str, Any]:
        """For ``json``."""
        return {
            "workers": self.workers,
            "steps": self.steps,
            "opened": self._opened,
            "todo": list(self._todo),
            "doing": [
                [portion, [list(one) for one in sorted(self._doing[portion].items())]] for portion in self.in_hand()
            ],
        }

    @classmethod
    def restore(cls, data: Mapping[str, Any]) -> "Portions":
        """The inverse of ``export``."""
        queue = cls(workers=data["workers"], steps=data["steps"])
        queue._opened = data["opened"]
        queue._todo = list(data["todo"])
        queue._doing = {portion: dict(holders) for portion, holders in data["doing"]}
        return queue
