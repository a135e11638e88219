"""How many connections a listener with keys keeps open, so that strangers cannot use up the descriptors of its process.

ZeroMQ accepts every connection and closes one that does not prove its key only after a while (``HANDSHAKE_IVL``). Until then each
costs a descriptor, so a stranger that opens connections and says nothing would leave none: no client gets in, no file can be
opened, and the thread that accepts spins. ZeroMQ has no limit for this, but it reports every connection that it accepts, with its
descriptor. A thread of its own (``ConnectionLimit``) reads those reports, because the event loop may be busy, and shuts down the
connections that are too many.

Which they are is decided by a pure table (``ConnectionTable``) from every event and the time. A connection that has not sent a
message yet may be a stranger's. Their number is bounded, in all and per address; the oldest connections of the address that has
most make room. An address that opens connections faster than they are closed is dropped by the kernel for a moment. A client
with a key has sent a message before its turn to go comes, and one that was unlucky connects again by itself.
"""

import collections
import contextlib
import os
import resource
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from shoal.comm.packetfilter import CAN_DROP, MOST_ADDRESSES, borrowed_socket, drop_addresses

Peer = tuple[str, int]
BANNED_SECONDS = 0.5
_MOST_WAITING = 256


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many connections a listener may have."""

    waiting: int
    """That have not spoken yet, of all addresses."""
    waiting_per_address: int
    total: int
    """Together with those that have."""


def choose_limits(num_descriptors: int, num_used: int) -> Limits:
    """The limits of a listener in a process that may have ``num_descriptors`` and uses ``num_used`` before anybody connects.

    Half of them is for those who have a key. The rest is in reserve: for files, for connections that this process opens, and for
    what is accepted before a limit is applied.
    """
    waiting = max(4, min(_MOST_WAITING, num_descriptors // 16))
    total = max(waiting, num_descriptors // 2 - num_used)
    return Limits(waiting=waiting, waiting_per_address=max(2, waiting // 2), total=total)


class ConnectionTable:
    """The connections of one listener, by their descriptors.

    Args:
        limits: see there.
        trusted_after: seconds after which a silent connection counts as a client with a key.
    """

    def __init__(self, limits: Limits, *, trusted_after: float) -> None:
        self.limits = limits
        self._trusted_after = trusted_after
        self._num_connected = 0
        self._waiting: dict[int, tuple[Peer, float]] = {}
        self._by_address: dict[str, dict[int, None]] = {}
        self._closed: collections.Counter[str] = collections.Counter()
        self._counted_since = float("-inf")
        self._banned: dict[str, float] = {}

    def add(self, descriptor: int, peer: Peer | None, now: float) -> list[tuple[int, Peer]]:
        """Add a connection; returns those that must be closed for it. A peer of None has gone already; ``remove`` follows."""
        self._num_connected += 1
        self._forget(descriptor)
        if peer is None:
            return []
        self._waiting[descriptor] = (peer, now)
        self._by_address.setdefault(peer[0], {})[descriptor] = None
        self._trust_old(now)
        limits, own = self.limits, self._by_address.get(peer[0], {})
        if len(own) > limits.waiting_per_address:
            return self._close_oldest(peer[0], now)
        if len(self._waiting) > limits.waiting or self._num_connected > limits.total:
            busiest = max(self._by_address, key=lambda address: len(self._by_address[address]))
            return self._close_oldest(busiest, now)
        return []

    def remove(self, descriptor: int) -> None:
        """A connection has ended."""
        self._num_connected -= 1
        self._forget(descriptor)

    def authenticate(self, descriptor: int) -> None:
        """A connection sent a message, which only a client with a key can do."""
        self._forget(descriptor)

    def close_all(self, now: float) -> list[tuple[int, Peer]]:
        """No descriptor is left: everybody who waits has to go."""
        found = [(descriptor, peer) for descriptor, (peer, _) in self._waiting.items()]
        for descriptor, peer in found:
            self._banned[peer[0]] = now + BANNED_SECONDS
            self._forget(descriptor)
        return found

    def banned(self, now: float) -> tuple[str, ...]:
        """The addresses that are not listened to at this moment."""
        self._banned = {address: until for address, until in self._banned.items() if until > now}
        return tuple(sorted(self._banned))

    @property
    def num_waiting(self) -> int:
        """Connections that have not spoken yet."""
        return len(self._waiting)

    def _close_oldest(self, address: str, now: float) -> list[tuple[int, Peer]]:
        if now - self._counted_since > 1.0:
            self._closed.clear()
            self._counted_since = now
        self._closed[address] += 1
        if self._closed[address] > self.limits.waiting_per_address:
            # All at once: who floods has nobody among them whom a second attempt would not bring back.
            self._banned[address] = now + BANNED_SECONDS
            self._closed[address] = 0
            going = list(self._by_address[address])
        else:
            going = [next(iter(self._by_address[address]))]
        found = [(descriptor, self._waiting[descriptor][0]) for descriptor in going]
        for descriptor in going:
            self._forget(descriptor)
        return found

    def _trust_old(self, now: float) -> None:
        for descriptor, (_, since) in list(self._waiting.items())[:2]:
            if now - since > self._trusted_after:
                self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        peer, _ = self._waiting.pop(descriptor, (None, 0.0))
        if peer is not None:
            self._by_address[peer[0]].pop(descriptor)
            if not self._by_address[peer[0]]:
                del self._by_address[peer[0]]


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
        """Note that a message came, so that its sender has a key; called on the thread of the event loop."""
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
                # While an address is dropped, time alone can change that.
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
