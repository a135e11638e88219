"""Why a message that arrived is dropped. Raised by the checks, counted by whoever received the message, never seen outside."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.comm.wire.header import Header


class Dropped(Exception):
    """A message that is not accepted.

    Args:
        reason: one of ``counters.DROPPED``.
        text: for the sender, where it can be told.
        header: the message's header, once it is known to be whole; without one there is nobody to tell.
    """

    def __init__(self, reason: str, text: str, header: "Header | None" = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text
        self.header = header
