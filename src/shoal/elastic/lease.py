"""The lease of a host: until when its ranks may take steps without a word from the coordinator.

The coordinator leaves a host out when it has not heard it for ``lease_seconds``. The host counts the same time from when it
*sent* the newest sign of life that was answered, which is earlier than when that arrived, and stops a margin before: so a host
that is cut off has stopped when others go on without it. The clocks need not agree; over one lease they may drift apart by the
margin.

An answer names an epoch (``State.lease_epoch``). A host that comes back after it was left out is answered again, perhaps
before the view without it arrives: so a lease is for the views of that epoch and later ones, and never for an earlier one.
"""

from dataclasses import dataclass

MARGIN = 0.1
"""The share of a lease by which a host stops earlier."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What a host holds. Never changed in place."""

    seconds: float
    """As the coordinator counts it (``elastic.lease_seconds``)."""
    until: float = float("-inf")
    """On this host's clock."""
    epoch: int = 0
    """The newest that an answer named."""

    def answered(self, *, sent: float, epoch: int) -> "Lease":
        """The lease after the coordinator answered, under this epoch, the sign of life that was sent then."""
        until = max(self.until, sent + self.seconds * (1 - MARGIN))
        return Lease(seconds=self.seconds, until=until, epoch=max(self.epoch, epoch))

    def is_valid(self, now: float, *, epoch: int) -> bool:
        """Whether ranks of this host may apply an update under this epoch now. Asked right before each."""
        return now < self.until and epoch >= self.epoch
