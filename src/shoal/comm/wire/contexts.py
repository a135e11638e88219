"""The ZeroMQ context of this process, and how every socket is set up.

Nodes without keys share one context, because ``inproc`` works inside one only; a node with keys has its own, because a context
has one authenticator. The shared one ends with its last node.
"""

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
        # Whoever has not proved its key by then is not waited for.
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_SECONDS * 1000))
        # Who comes in a crowd waits in the kernel's queue, and not for a second until it knocks again.
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        # A machine that lost its power says no goodbye.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return socket
