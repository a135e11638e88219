"""The queue of portions: todo, doing, done. A portion is in exactly one of the three, so none can be lost.

Steps are opened one after the other, so the queue holds what is in hand and not the whole run. Done is what was opened and is
neither todo nor doing; a dead worker's portions go back to where they were in the order, which is the front.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


# TODO docstring of the former paramserver.members:
# What the book knows of a worker that is alive: its place, how long its steps take, and what it committed lately.

REMEMBERED = 64
"""Commits kept for each worker, so that one that is sent again gets the same answer."""
GONE_KEPT = 1024
"""Departed workers that are remembered, by the book and by the shards, so that what they still send does not count. An older one
is in no view, and nobody listens to it. By number and not by time, so that every copy of the book forgets the same ones."""
DUPLICATE, DROPPED, REFUSED = -1, -2, -3
"""What is remembered in place of a round when a contribution was not used."""
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
    """Version that contains every contribution of its own that is in a closed round."""
    remembered: tuple[tuple[int, int], ...] = ()
    """Its last commits: number, and the round or why there is none."""

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


def member_from_json(data: Mapping[str, Any]) -> Member:
    """The inverse of ``dataclasses.asdict``."""
    return Member(**{**data, "remembered": tuple((number, outcome) for number, outcome in data["remembered"])})
