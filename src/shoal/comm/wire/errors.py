"""What can go wrong with a call, and with a message that arrives."""

from shoal.core.errors import RunError


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
