"""Why a call fails, why a message that arrived is dropped, and how often each reason occurred."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.core.errors import RunError

if TYPE_CHECKING:
    from shoal.comm.wire.message import Header


class WireError(RunError):
    """A call on the wire did not succeed."""


class WireTimeout(WireError):
    """Nobody answered in time; the message names the address, the operation and the seconds."""

    def __init__(self, message: str, *, address: str, operation: str) -> None:
        super().__init__(message)
        self.address = address
        self.operation = operation


class WireLost(WireTimeout):
    """The connection broke while a call waited for its answer: it may or may not have been carried out."""


class WireClosed(WireTimeout):
    """This side closed its end while a call waited for its answer."""


class Refused(WireError):
    """The other side answered, and the answer is no."""

    def __init__(self, code: str, text: str, *, epoch: int, address: str, operation: str) -> None:
        super().__init__(f"{address} refused {operation} ({code}, at epoch {epoch}): {text}")
        self.code = code
        """A word that programs compare: ``stale``, ``unknown``, ``malformed``, ``busy``, or one of the room's that answered."""
        self.text = text
        self.epoch = epoch
        """The epoch of the one that refused."""
        self.address = address
        self.operation = operation


class Dropped(Exception):
    """A message that is not accepted. The checks raise it, and the receiver counts it; it is never seen outside the wire.

    Args:
        reason: one of ``DROPPED``.
        text: for the sender, where it can be told.
        header: the message's header, once it is known to be whole; without one there is nobody to tell.
    """

    def __init__(self, reason: str, text: str, header: "Header | None" = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text
        self.header = header


DROPPED = (
    "frames",  # a wrong number of frames, or a frame of a wrong length
    "malformed",  # a header or body that does not decode to its type
    "version",  # another version of the protocol
    "unknown",  # an operation that is not in the table, or an answer to nothing that was asked
    "oversized",  # a body or payload above the operation's limit
    "payload",  # the bytes are not those that dtype and shape ask for
    "place",  # a place in shared memory that does not exist, is not the sender's, or does not hold the payload
    "corrupt",  # the checksum differs
    "stale",  # sent under an epoch that is over, by a process that is no member of the present one
    "behind",  # sent under an epoch that is over by a member of the present one, which will hear of it
    "duplicate",  # seen before
    "busy",  # more requests at work than this process takes, or no memory for a payload
    "late",  # an answer to a call that is over
    "incomplete",  # a payload of which not all chunks came
)
"""Reasons for which a message that arrived is dropped."""
EXPECTED = frozenset({"behind"})
"""Of these, what happens without any fault: news of a new epoch is not everywhere at once."""
FAILED = (
    "expired",  # an answer that was not sent, because the one who asked no longer waits
    "gone",  # an answer that was not sent, because the connection is
    "failed",  # a handler that ended with an error
)
"""What else is counted: these were accepted messages."""


class Counters:
    """Messages that arrived, by what became of each: ``received == accepted + dropped`` at any moment between two messages."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        """One more of ``reason``: ``received``, ``accepted``, one of ``DROPPED`` or one of ``FAILED``."""
        self._counts[reason] += 1

    def __getitem__(self, reason: str) -> int:
        return self._counts[reason]

    @property
    def dropped(self) -> int:
        """Messages that were dropped, for whatever reason."""
        return sum(self._counts[reason] for reason in DROPPED)

    def as_dict(self) -> Mapping[str, int]:
        """Those that are not zero, by reason."""
        return {reason: count for reason, count in sorted(self._counts.items()) if count}
