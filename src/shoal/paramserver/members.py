"""What the book knows of a worker that is alive: its place, how long its steps take, and what it committed lately."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
