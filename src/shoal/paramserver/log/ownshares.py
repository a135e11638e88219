"""Which shares of a step are given to the worker of their index alone, where who computes one decides its bits.

A worker that keeps what it has not sent adds it to whatever share it does next. So shares belong to whoever is alive, and for a
while to those who have not come yet; the shares of one that has left are anybody's.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class OwnShares:
    """Who has come. Plain state, no clock.

    Attributes:
        workers: shares of a step.
        seconds: how long after the first worker's coming the others' shares wait for them; 0: nothing is anybody's own.
    """

    workers: int
    seconds: float
    came: set[int] = field(default_factory=set)
    first_came: float | None = None

    def join(self, index: int, now: float) -> None:
        """A worker has come."""
        self.came.add(index % self.workers)
        self.first_came = now if self.first_came is None else self.first_came

    def rebase(self, now: float) -> None:
        """The first came now: for a log leader with another clock."""
        self.first_came = None if self.first_came is None else now

    def until(self, now: float) -> float | None:
        """When shares of those who have not come are anybody's; None when that is so already, or always was."""
        end = None if self.first_came is None else self.first_came + self.seconds
        return end if end is not None and now < end else None

    def reserved(self, alive: Iterable[int], now: float) -> Collection[int]:
        """Shares that only the worker of their index is given.

        Args:
            alive: indices of the workers that are.
            now: the time.
        """
        if not self.seconds:
            return ()
        absent = set() if self.until(now) is None else set(range(self.workers)) - self.came
        return {index % self.workers for index in alive} | absent

    def export(self) -> dict[str, Any]:
        """For ``json``."""
        return {"seconds": self.seconds, "came": sorted(self.came), "first_came": self.first_came}

    @classmethod
    def restore(cls, data: dict[str, Any], workers: int) -> "OwnShares":
        """The inverse of ``export``; checkpoints of releases before have nothing."""
        found = cls(workers=workers, seconds=data.get("seconds", 0.0))
        found.came, found.first_came = set(data.get("came", ())), data.get("first_came")
        return found
