"""A request that arrived, in the hands of the one who will answer it: now, or much later."""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.comm.wire.buffers import Payload
from shoal.comm.wire.header import REFUSED, Header
from shoal.comm.wire.operations import Refusal

if TYPE_CHECKING:
    from shoal.comm.wire.listener import Listener


class Request:
    """What somebody asks. Answer or refuse it once; a request that is never answered costs its sender the whole deadline."""

    def __init__(
        self, listener: "Listener", route: bytes, header: Header, body: Any, payload: memoryview | None
    ) -> None:
        self._listener = listener
        self.route = route
        """The connection that it came over."""
        self._is_open = True
        self._expires = time.monotonic() + header.deadline
        self.header = header
        self.body = body
        """The struct of the operation."""
        self.payload = payload
        """The payload's bytes, or None. They stay as they are for as long as anything refers to them."""

    def __repr__(self) -> str:
        return f"Request({self.operation} {self.key!r} from {self.sender}, epoch {self.epoch})"

    @property
    def sender(self) -> str:
        """The incarnation of the one who asks."""
        return self.header.sender

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return self.header.operation

    @property
    def key(self) -> str:
        """What the request is about."""
        return self.header.key

    @property
    def epoch(self) -> int:
        """The epoch of the one who asks, when it asked."""
        return self.header.epoch

    @property
    def remaining(self) -> float:
        """Seconds that the one who asks will still wait; not below 0."""
        return max(0.0, self._expires - time.monotonic())

    @property
    def is_open(self) -> bool:
        """True while it is neither answered nor refused, and somebody still waits for it."""
        return self._is_open and self.remaining > 0

    async def answer(self, body: msgspec.Struct, payload: Payload | None = None) -> None:
        """Answer. Returns when the payload's memory may be changed again, or when nobody waits any more.

        Args:
            body: of the operation's answer type.
            payload: a torch tensor, a numpy array or bytes; contiguous.
        """
        self._settle()
        await self._listener.send_answer(self, self.operation, body, payload)

    async def refuse(self, code: str, text: str) -> None:
        """Say no: the call that asked ends with ``Refused``.

        Args:
            code: a word that programs compare.
            text: one sentence for people, with the numbers and the fix.
        """
        self._settle()
        await self._listener.send_answer(self, REFUSED, Refusal(code, text), None)

    def _settle(self) -> None:
        assert self._is_open, f"{self} was answered before"
        self._is_open = False
