"""What an election promises, whichever way it is held.

A leader holds a lease: until it runs out nobody else leads, and a leader that cannot renew in time must take itself for deposed,
by its own clock, before anybody else begins. A clock cannot stop a process between its last look and its send, so the lease is
only half of the promise. The other half is the epoch: no two leaders ever have the same, a later leader has a higher one, and
a member that takes instructions keeps the highest epoch it has seen and refuses what comes with a lower one.
"""

from dataclasses import dataclass
from typing import Protocol

from shoal.core.errors import RunError


class Deposed(RunError):
    """This candidate leads no longer: its lease ran out, or somebody else has a higher epoch. It may campaign again."""


@dataclass(frozen=True, kw_only=True)
class Center:
    """The leader, as others find it."""

    epoch: int
    address: str
    name: str


class Elector(Protocol):
    """One candidate's part in the election."""

    @property
    def epoch(self) -> int:
        """The epoch this candidate leads under, or last led under; 0 before the first."""

    async def campaign(self) -> int:
        """Wait until this candidate leads, for as long as that takes; cancel it to stop.

        Returns:
            The epoch it leads under.
        """

    async def advance(self) -> int:
        """Take the next epoch, because the membership changed.

        Raises:
            Deposed: somebody else leads, or the lease ran out.
        """

    async def renew(self) -> None:
        """Extend the lease; to be called every third of it.

        Raises:
            Deposed: somebody else leads, or the lease ran out.
        """

    def is_valid(self) -> bool:
        """True while this candidate is inside its lease. Costs one look at the clock: ask before every instruction."""

    async def resign(self) -> None:
        """Give the lead back at once, so that nobody has to wait for the lease to run out."""
