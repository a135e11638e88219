"""The queue of work units: todo, doing, done. A work unit is in exactly one of the three, so none can be lost.

Steps are opened one after the other, so the queue holds what is in hand and not the whole run. Done is what was opened and is
neither todo nor doing; a dead worker's work units go back to where they were in the order, which is the front.
"""

import bisect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.paramserver.records import Answer, Committed, Dropped, Duplicate, Refused


class WorkQueue:
    """Who does what. Plain state, no clock: times are what the caller says."""

    def __init__(self, *, workers: int, steps: int) -> None:
        self.workers = workers
        self.steps = steps
        self._opened = 0
        self._todo: list[int] = []
        self._doing: dict[int, dict[str, float]] = {}

    @property
    def is_over(self) -> bool:
        """True when every work unit of every step is done."""
        return self._opened == self.steps and not self._todo and not self._doing

    @property
    def num_done(self) -> int:
        """Work units that are done."""
        return self._opened * self.workers - len(self._todo) - len(self._doing)

    @property
    def num_todo(self) -> int:
        """Work units of opened steps that nobody does."""
        return len(self._todo)

    @property
    def next_step(self) -> int | None:
        """Step of the first work unit that nobody does; None when there is none left."""
        if self._todo:
            return self._todo[0] // self.workers
        return self._opened if self._opened < self.steps else None

    def give(self, worker: str, index: int, now: float, reserved: Collection[int] = ()) -> int | None:
        """Hand out a work unit of ``next_step``: the worker's own share where it is free, else the first that is not reserved.

        None, and nothing is changed, when there are only reserved ones.
        """
        step = self.next_step
        assert step is not None, "no work unit left to give"
        if not self._todo:
            self._todo = list(range(step * self.workers, (step + 1) * self.workers))
            self._opened += 1
        own = step * self.workers + index % self.workers
        free = [one for one in self._todo if one % self.workers not in reserved]
        if own not in self._todo and not free:
            return None
        unit = own if own in self._todo else free[0]
        self._todo.remove(unit)
        self._doing[unit] = {worker: now}
        return unit

    @property
    def is_idle(self) -> bool:
        """No work unit is to do, and none is being done."""
        return not self._todo and not self._doing

    def pass_over(self) -> None:
        """The next step is done by others than workers: none of its work units is given to anyone."""
        assert self.is_idle, "work units of an earlier step are still to do"
        self._opened += 1

    def share(self, worker: str, unit: int, now: float) -> None:
        """Hand a work unit that another does to this worker as well; the first to commit it wins."""
        self._doing[unit][worker] = now

    def is_done(self, unit: int) -> bool:
        """True when its gradient is committed."""
        return unit < self._opened * self.workers and unit not in self._todo and unit not in self._doing

    def holders(self, unit: int) -> Mapping[str, float]:
        """The workers that do a work unit, each with the time it took it."""
        return self._doing.get(unit, {})

    def held_by(self, worker: str) -> list[int]:
        """The work units that a worker does, in order."""
        return sorted(unit for unit, holders in self._doing.items() if worker in holders)

    def in_hand(self) -> list[int]:
        """Every work unit that somebody does, in order."""
        return sorted(self._doing)

    def finish(self, unit: int) -> None:
        """A work unit is done, for all who do it; also one that was given up, and whose result came after all."""
        if self._doing.pop(unit, None) is None:
            self._todo.remove(unit)

    def release(self, worker: str, units: list[int]) -> tuple[int, ...]:
        """A worker gives work units up; those that nobody else does are todo again and are returned."""
        freed = []
        for unit in units:
            holders = self._doing[unit]
            del holders[worker]
            if not holders:
                del self._doing[unit]
                bisect.insort(self._todo, unit)
                freed.append(unit)
        return tuple(freed)

    def reopen(self, unit: int) -> None:
        """A work unit that was done is todo again: its gradient was lost before it was used."""
        assert self.is_done(unit), f"work unit {unit} is not done"
        bisect.insort(self._todo, unit)

    def rebase(self, now: float) -> None:
        """All were taken now: for a log leader with another clock."""
        self._doing = {unit: dict.fromkeys(holders, now) for unit, holders in self._doing.items()}

    def export(self) -> dict[str, Any]:
        """For ``json``."""
        return {
            "workers": self.workers,
            "steps": self.steps,
            "opened": self._opened,
            "todo": list(self._todo),
            "doing": [[unit, [list(one) for one in sorted(self._doing[unit].items())]] for unit in self.in_hand()],
        }

    @classmethod
    def restore(cls, data: Mapping[str, Any]) -> "WorkQueue":
        """The inverse of ``export``."""
        queue = cls(workers=data["workers"], steps=data["steps"])
        queue._opened = data["opened"]
        queue._todo = list(data["todo"])
        queue._doing = {unit: dict(holders) for unit, holders in data["doing"]}
        return queue


# What the update log knows of a worker that is alive: its place, how long its steps take, and what it committed lately.

REMEMBERED = 64
"""Commits kept for each worker, so that one that is sent again gets the same answer."""
GONE_KEPT = 1024
"""Departed workers that are remembered, by the update log and by the shards, so that what they still send does not count. An
older one is in no view, and nobody listens to it. By number and not by time, so that every copy of the update log forgets the
same ones."""
DUPLICATE, DROPPED, REFUSED = -1, -2, -3
"""What is remembered in place of an update when a push was not used."""
# The mean step time follows the last few steps: a machine may slow down at any time.
_MEAN_OVER = 8


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker that is alive."""

    index: int
    """Its place among the workers: the share that it prefers."""
    num_timed: int = 0
    step_seconds: float = 0.0
    """Mean time from take to commit, without random waits; 0.0 before the first commit."""
    need: int = 0
    """Version that contains every push of its own that is in a closed update."""
    remembered: tuple[tuple[int, int], ...] = ()
    """Its last commits: number, and the update or why there is none."""

    @property
    def oldest(self) -> int:
        """Lowest number whose answer is certain to be known."""
        return self.remembered[0][0] if len(self.remembered) == REMEMBERED else 0

    def outcome(self, number: int) -> int | None:
        """What became of a commit; None when it is new."""
        return dict(self.remembered).get(number)

    def remember(self, number: int, outcome: int) -> "Member":
        """With one more commit."""
        return replace(self, remembered=tuple(sorted([*self.remembered, (number, outcome)])[-REMEMBERED:]))

    def timed(self, seconds: float) -> "Member":
        """With one more step time."""
        count = self.num_timed + 1
        mean = self.step_seconds + (seconds - self.step_seconds) / min(count, _MEAN_OVER)
        return replace(self, num_timed=count, step_seconds=mean)


def answer_again(outcome: int) -> Answer:
    """What a worker is told that commits a push once more."""
    if outcome == DUPLICATE:
        return Duplicate()
    if outcome == DROPPED:
        return Dropped(age=None)
    if outcome == REFUSED:
        return Refused(reason="it was refused before, and a number is used once")
    return Committed(update=outcome, is_again=True)
