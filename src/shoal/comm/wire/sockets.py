"""The ZeroMQ context of this process, how every socket is set up, and a socket on the event loop.

Nodes without keys share one context, because ``inproc`` works inside one only; a node with keys has its own, because a context
has one authenticator. The shared one ends with its last node.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from shoal.comm.wire.buffers import CHUNK_BYTES
from shoal.comm.wire.connections import HANDSHAKE_SECONDS

_HIGH_WATER = 256
"""Messages that may wait for a connection, each way: at most as many MB for a peer that sends faster than is read."""
_ENCRYPTION_BYTES = 64
"""What an encrypted frame is longer by, at most."""
_LARGE_BLOCK_BYTES = 31 << 20
"""Just under the limit of what glibc learns from."""
_BACKLOG = 64
_RECONNECT_MS = 10
_RECONNECT_MAX_MS = 200
_HEARTBEAT_MS = 5000
_HEARTBEAT_TIMEOUT_MS = 20000

_shared: "zmq.Context[zmq.Socket[bytes]] | None" = None
_num_users = 0


def acquire_context(*, own: bool) -> "zmq.Context[zmq.Socket[bytes]]":
    """The shared context, or one of its own."""
    global _shared, _num_users
    _teach_allocator()
    if own:
        return zmq.Context()
    if _shared is None or _shared.closed:
        _shared, _num_users = zmq.Context(), 0
    _num_users += 1
    return _shared


def release_context(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """The user of a context has closed its sockets."""
    global _shared, _num_users
    if context is _shared:
        _num_users -= 1
        if _num_users:
            return
        _shared = None
    context.term()


def _teach_allocator() -> None:
    """Allocate and free one large block, from which glibc learns to keep blocks up to its size instead of returning them.

    ZeroMQ allocates every chunk that arrives. Returned to the kernel each time, their pages are cleared and mapped anew for every
    payload, which took a third of the system time of a transfer. A process that has freed a large tensor is in this state anyway.
    """
    np.empty(_LARGE_BLOCK_BYTES, np.uint8)


def open_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, *, is_tcp: bool) -> "zmq.Socket[bytes]":
    """A socket that never holds up the end of its process, queues little, and takes no frame above a chunk."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.IPV6, 0)
    # The connection is cut before memory for a longer frame is asked for.
    socket.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES + _ENCRYPTION_BYTES)
    if kind == zmq.DEALER:
        # Only what is connected is sent to: nothing waits for a dead process and then reaches its successor.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    else:
        # A full queue is an error then, and not a message that is lost without a word.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if is_tcp:
        # A client that has not proved its key by then is not waited for.
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_SECONDS * 1000))
        # Who comes in a crowd waits in the kernel's queue, and not for a second until it knocks again.
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        # A machine that lost its power says no goodbye.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return socket


_TURN_SECONDS = 0.002
"""How long one turn takes messages from the socket while others wait."""
_ROUTE_FULL_SECONDS = 0.001
"""How long to wait when the queue to one client is full; a ROUTER does not say when there is room in it."""


class AsyncSocket:
    """A ZeroMQ socket on the event loop: it hands over what arrives, and sends without ever blocking the loop.

    ``zmq.asyncio`` does the same with a future and a turn of the loop for every message. A payload crosses in many messages, so
    here everything that has arrived is taken in one turn, up to a share of time that leaves the loop to others.
    """

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
