"""How many messages arrived, and what became of each: every one is either accepted or dropped for exactly one reason."""

from collections import Counter
from collections.abc import Mapping

DROPPED = (
    "frames",  # a wrong number of frames, or a frame of a wrong length
    "malformed",  # a header or body that does not decode to its type
    "version",  # another version of the protocol
    "unknown",  # an operation that is not in the table, or an answer to nothing that was asked
    "oversized",  # a body or payload above the operation's limit
    "payload",  # the bytes are not those that dtype and shape ask for
    "place",  # a place in shared memory that does not exist, is not the sender's, or does not hold the payload
    "corrupt",  # the checksum differs
    "stale",  # sent under an epoch that is over, by somebody who does not belong to the one of now
    "behind",  # sent under an epoch that is over by somebody who belongs to the one of now, and will hear of it
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
    """Counts by reason. ``received == accepted + dropped`` at any moment between two messages."""

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
