"""A ZeroMQ socket on the event loop: hands over what arrives, and sends without ever blocking the loop.

``zmq.asyncio`` does the same with a future and a turn of the loop for every message. A payload crosses in many messages, so here
everything that has arrived is taken in one turn, up to a share of time that leaves the loop to others.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import zmq

_TURN_SECONDS = 0.002
"""How long one turn takes messages from the socket while others wait."""
_ROUTE_FULL_SECONDS = 0.001
"""How long to wait when the queue to one client is full; a ROUTER does not say when there is room in it."""


class Pump:
    """One socket; used by the thread of its event loop."""

    def __init__(self, socket: "zmq.Socket[bytes]", receive: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._is_router = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_scheduled = False
        self.is_closed = False
        self._loop.add_reader(self._descriptor, self._turn)
        self._schedule()

    def try_send(
        self, frames: Sequence[bytes | memoryview], *, copy: bool = False, track: bool = False
    ) -> zmq.MessageTracker | None:
        """Send now.

        Raises:
            zmq.Again: there is no connection, or its queue is full.
            zmq.ZMQError: a ROUTER does not know the receiver (any more).
        """
        try:
            return self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy, track=track)
        finally:
            # The descriptor signals changes only, and sending may have swallowed the signal of an arrival.
            if self._events() & zmq.POLLIN:
                self._schedule()

    async def send(
        self, frames: Sequence[bytes | memoryview], *, copy: bool = False, track: bool = False
    ) -> zmq.MessageTracker | None:
        """Send as soon as there is a connection with room in its queue; cancelled by the caller's deadline.

        Raises:
            zmq.ZMQError: a ROUTER does not know the receiver (any more), or the socket was closed.
        """
        while True:
            try:
                return self.try_send(frames, copy=copy, track=track)
            except zmq.Again:
                pass
            if self._is_router:
                await asyncio.sleep(_ROUTE_FULL_SECONDS)
            elif not self._events() & zmq.POLLOUT:
                await self._wait_writable()
            if self.is_closed:
                raise zmq.ZMQError(zmq.ENOTSOCK)

    def close(self) -> None:
        """Close the socket; what it has not sent yet is not sent any more."""
        if not self.is_closed:
            self.is_closed = True
            self._loop.remove_reader(self._descriptor)
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
            self._socket.close(linger=0)

    async def _wait_writable(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)

    def _schedule(self) -> None:
        if not self._is_scheduled and not self.is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        end = time.monotonic() + _TURN_SECONDS
        while not self.is_closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            # Before the message is looked at: a mistake there must not leave the others lying.
            self._schedule()
            self._receive(frames)
            if time.monotonic() > end:
                return
        if self.is_closed:
            return
        events = self._events()
        if events & zmq.POLLIN:
            self._schedule()
        if events & zmq.POLLOUT:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))
