"""How many connections a listener with keys keeps open: strangers must not use up the descriptors of its process.

ZeroMQ accepts whoever connects and closes one that does not prove its key only after a while (``HANDSHAKE_IVL``). Until then
each costs a descriptor, so whoever opens connections and says nothing would leave none: no client gets in, no file can be
opened, and the thread that accepts spins. ZeroMQ has no limit for this, but it tells of every connection that it accepts, with
its descriptor. A thread of its own reads that, because the event loop may be busy, and shuts down those that are too many
(``connectiontable.py``); an address that floods is dropped by the kernel for a moment. A client with a key has spoken before
its turn to go comes, and one that was unlucky connects again by itself.
"""

import contextlib
import os
import resource
import secrets
import socket
import sys
import threading
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from shoal.comm.packetfilter import CAN_DROP, MOST_ADDRESSES, borrowed_socket, drop_addresses
from shoal.comm.wire.connectiontable import BANNED_SECONDS, ConnectionTable, Peer, choose_limits

HANDSHAKE_SECONDS = 10.0
"""A connection that has not proved its key by then is closed."""
_EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)
_STOP_SECONDS = 5.0


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as its user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS says that there is no limit, and then refuses it.
    if soft != hard and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ConnectionLimit:
    """Watches one listening socket, from before it is bound until ``stop``.

    Args:
        context: of the socket.
        listening: the socket, not yet bound.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", listening: "zmq.Socket[bytes]") -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Twice as long as ZeroMQ lets anybody without a key: its clock may have begun later.
        self._table = ConnectionTable(choose_limits(soft, _num_open_descriptors()), trusted_after=2 * HANDSHAKE_SECONDS)
        self._lock = threading.Lock()
        self._listening = listening
        self._descriptor = -1
        self._dropped: tuple[str, ...] = ()
        address = f"inproc://connections-{secrets.token_hex(8)}"
        listening.monitor(address, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(address)
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)
        self._thread.start()

    def note_spoken(self, frame: zmq.Frame) -> None:
        """A message came, so whoever sent it has a key; called on the thread of the event loop."""
        if self._table.num_waiting:
            with self._lock:
                self._table.authenticate(int(frame.get(zmq.SRCFD)))

    def stop(self) -> None:
        """Stop watching; before the listening socket is closed."""
        self._listening.disable_monitor()
        self._thread.join(_STOP_SECONDS)

    def _watch(self) -> None:
        # A context that ends before ``stop`` ends this too.
        with self._monitor, contextlib.suppress(zmq.ContextTerminated):
            while True:
                # While somebody is dropped, time alone can change that.
                if not self._dropped or self._monitor.poll(round(BANNED_SECONDS * 1000)):
                    found = parse_monitor_message(self._monitor.recv_multipart())
                    if found["event"] == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self._take(found["event"], int(found["value"]))
                self._drop_banned()

    def _take(self, event: int, descriptor: int) -> None:
        now = time.monotonic()
        going: list[tuple[int, Peer]] = []
        peer = _peer_of(descriptor) if event == zmq.EVENT_ACCEPTED else None
        with self._lock:
            if event == zmq.EVENT_LISTENING:
                self._descriptor = descriptor
            elif event == zmq.EVENT_ACCEPTED:
                going = self._table.add(descriptor, peer, now)
            elif event == zmq.EVENT_DISCONNECTED:
                self._table.remove(descriptor)
            else:
                going = self._table.close_all(now)
        for one, whose in going:
            _shut_down(one, whose)

    def _drop_banned(self) -> None:
        banned = self._table.banned(time.monotonic())[:MOST_ADDRESSES]
        if CAN_DROP and banned != self._dropped and self._descriptor >= 0:
            with contextlib.suppress(OSError):
                drop_addresses(self._descriptor, banned)
            self._dropped = banned


def _num_open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _peer_of(descriptor: int) -> Peer | None:
    """Who is at the other end of a connection of ZeroMQ's; None when it is not a connection any more."""
    try:
        with borrowed_socket(descriptor) as borrowed:
            host, port = borrowed.getpeername()
            return str(host), int(port)
    except (OSError, ValueError):
        return None


def _shut_down(descriptor: int, peer: Peer) -> None:
    """End a connection, which ZeroMQ then closes, unless the descriptor is another's by now."""
    if _peer_of(descriptor) == peer:
        with contextlib.suppress(OSError), borrowed_socket(descriptor) as borrowed:
            borrowed.shutdown(socket.SHUT_RDWR)
