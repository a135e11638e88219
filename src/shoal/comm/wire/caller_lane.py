"""The lane of one who calls: connected when a long payload first crosses, and again after it broke."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from shoal.comm.wire.counters import Counters
from shoal.comm.wire.errors import WireError
from shoal.comm.wire.lane import Begin, Lane, Spawn, hear_word
from shoal.comm.wire.operations import LaneOffer

_OPEN_SECONDS = 1.0
_AGAIN_SECONDS = 5.0
"""How long payloads go with the messages after a lane could not be had."""


class CallerLane:
    """At most one lane to one peer.

    Args:
        host: where the peer listens.
        ask: asks the peer for a port and a word, within so many seconds.
        begin: what becomes of a message that arrives over the lane.
        counters: of the node.
        spawn: starts a task that ends with the node.
        on_end: called with a lane that has ended.
    """

    def __init__(
        self,
        host: str,
        *,
        ask: Callable[[float], Awaitable[LaneOffer]],
        begin: Begin,
        counters: Counters,
        spawn: Spawn,
        on_end: Callable[[Lane], None],
    ) -> None:
        self._host = host
        self._ask = ask
        self._begin = begin
        self._counters = counters
        self._spawn = spawn
        self._on_end = on_end
        self._lane: Lane | None = None
        self._opening = asyncio.Lock()
        self._num_closed = 0
        self._not_before = 0.0

    async def use(self, seconds: float) -> Lane | None:
        """The lane, connected if there is none; None when payloads have to go with the messages."""
        loop = asyncio.get_running_loop()
        if self._lane is None and loop.time() >= self._not_before:
            # Short of the caller's own deadline: whatever is wrong, with lanes or with the peer, messages show it or do without.
            limit = min(seconds / 4, _OPEN_SECONDS)
            with contextlib.suppress(WireError, OSError):
                async with asyncio.timeout(limit), self._opening:
                    if self._lane is None:
                        await self._connect(limit)
            if self._lane is None:
                self._not_before = loop.time() + _AGAIN_SECONDS
        return self._lane

    def open(self, seconds: float) -> None:
        """Connect it in the background, for payloads that are to come."""
        if self._lane is None and not self._opening.locked():
            self._spawn(self._open(seconds))

    def close(self) -> None:
        """The peer is gone, or is left."""
        self._num_closed += 1
        if self._lane is not None:
            self._lane.close()

    async def _open(self, seconds: float) -> None:
        await self.use(seconds)

    async def _connect(self, seconds: float) -> None:
        num_closed = self._num_closed
        offer = await self._ask(seconds)
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        lane = None
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, (self._host, offer.port))
            await loop.sock_sendall(connection, offer.word)
            # Not before this has come is it a lane: the dock may have no room, or be somebody else.
            is_known = await hear_word(connection) == offer.reply
            if is_known and self._num_closed == num_closed:
                lane = Lane(
                    connection, begin=self._begin, counters=self._counters, spawn=self._spawn, on_end=self._forget
                )
        finally:
            if lane is None:
                connection.close()
        self._lane = lane

    def _forget(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            self._on_end(lane)
