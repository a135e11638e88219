"""The agent's end of the remote shell: a thread that reads what the coordinator sends, answers its pings and relays the store.

It is a thread because the main one waits: for a fork server to import, for ranks to end. Ranks die with the thread that started
them, so the main thread starts them.
"""

import contextlib
import itertools
import os
import queue
import selectors
import socket
import tempfile
import threading
import time
from collections import deque
from typing import Any

import msgspec

from shoal.comm.store.messages import Answer, Ask, Messages, encode
from shoal.core.errors import RunError
from shoal.launch.hosts.messages import (
    Bye,
    EndMember,
    Enter,
    Listen,
    Order,
    Over,
    Ping,
    Pong,
    Probe,
    Publish,
    Start,
    StartMember,
    ToAgent,
    ToGroup,
)
from shoal.launch.supervisor import ORDER_KILL, SignalInbox

FIRST_LEASE_SECONDS = 120.0
"""How long the coordinator may be silent before it has said how long it may be silent."""
_MOST_BUFFERED = 8 << 20
_READ_BYTES = 64 * 1024
_TURN_SECONDS = 0.25
_MOST_UNHEARD = 0.9
"""The share of a lease after which a host stops, sooner than the coordinator gives it up (``elastic/lease.py`` says why)."""
_RANK_SECONDS = 5.0
"""How long a rank may take to read an answer that it waits for."""


Work = Enter | Start | Listen | Probe | Bye


class StoreSocket:
    """A listening unix socket that has no name any more: who has inherited ``descriptor`` can connect, and nobody else."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with tempfile.TemporaryDirectory(prefix="shoal-store-") as folder:
            path = os.path.join(folder, "s")
            self.listener.bind(path)
            self.listener.listen(1024)
            self.descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        self.listener.setblocking(False)
        self.path = f"/proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        """Nobody can connect any more."""
        self.listener.close()
        os.close(self.descriptor)


class Link(threading.Thread):
    """The line to the coordinator.

    Args:
        reading: where its messages come from.
        writing: where messages to it go.
        inbox: gets what ranks are ordered.
    """

    def __init__(self, reading: int, writing: int, inbox: SignalInbox) -> None:
        super().__init__(name="coordinator", daemon=True)
        self.store = StoreSocket()
        self.work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        """What the main thread is to do, one after the other; ``Bye`` is the last."""
        self.lost = ""
        """Why the line is of no use any more; empty while it is."""
        self.lease_seconds = FIRST_LEASE_SECONDS
        self.group: queue.SimpleQueue[ToGroup] = queue.SimpleQueue()
        """What the ranks of an elastic run are told; another queue with each generation."""
        self.generation = -1
        """The one that runs here; set by the main thread. Orders for another one are late."""
        self._reading, self._writing, self._inbox = reading, writing, inbox
        self._messages = Messages(ToAgent)
        self._outgoing: deque[bytes] = deque()
        self._buffered = 0
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._ranks: dict[socket.socket, Messages] = {}
        self._asked: dict[int, tuple[socket.socket, int]] = {}
        self._numbers = itertools.count()
        self._heard = time.monotonic()
        self._answered: float | None = None
        """When the newest pong was sent that the coordinator is known to have heard."""
        self._goes_on = False
        """Ranks elsewhere go on without those of this host."""
        self._is_closing = False

    def send(self, message: msgspec.Struct, *, can_drop: bool = False) -> None:
        """Send a message to the coordinator; from any thread, and at once. One that may be dropped is, when too much waits."""
        data = encode(message)
        with self._lock:
            if can_drop and self._buffered > _MOST_BUFFERED:
                return
            self._outgoing.append(data)
            self._buffered += len(data)
        self._notify()

    def close(self, seconds: float = 10.0) -> None:
        """Send what is left, and end the thread."""
        self._is_closing = True
        self._notify()
        self.join(seconds)
        self.store.close()

    def run(self) -> None:
        """Serve until the coordinator is gone or the agent is done."""
        for descriptor in (self._reading, self._writing):
            os.set_blocking(descriptor, False)
        self._selector.register(self._reading, selectors.EVENT_READ, self._read)
        self._selector.register(self._woken, selectors.EVENT_READ, self._clear)
        self._selector.register(self.store.listener, selectors.EVENT_READ, self._accept)
        try:
            while not self.lost and not (self._is_closing and not self._outgoing):
                self._flush()
                for key, _ in self._selector.select(min(_TURN_SECONDS, self.lease_seconds / 20)):
                    key.data(*([key.fileobj] if isinstance(key.fileobj, socket.socket) else []))
                self._check_lease()
        except (OSError, RunError) as error:
            self._lose(str(error))
        finally:
            self._lose("the agent is done")

    def _check_lease(self) -> None:
        """End where the coordinator may have given this host up: others may go on without it then."""
        now = time.monotonic()
        if now - self._heard > self.lease_seconds:
            self._lose(f"the coordinator was silent for {now - self._heard:.1f} s")
        elif self._goes_on and self._answered is not None and now - self._answered > _MOST_UNHEARD * self.lease_seconds:
            self._lose(f"the coordinator has heard nothing of this host for {now - self._answered:.1f} s")

    def _lose(self, reason: str) -> None:
        if not self.lost:
            self.lost = reason
            self._inbox.post(ORDER_KILL)
            self.work.put(Bye())

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def _clear(self, woken: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)

    def _flush(self) -> None:
        while self._outgoing:
            data = self._outgoing[0]
            try:
                sent = os.write(self._writing, data)
            except BlockingIOError:
                self._watch_writing(True)
                return
            with self._lock:
                self._buffered -= sent
                if sent == len(data):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = data[sent:]
        self._watch_writing(False)

    def _watch_writing(self, is_wanted: bool) -> None:
        is_watched = self._writing in self._selector.get_map()
        if is_wanted and not is_watched:
            self._selector.register(self._writing, selectors.EVENT_WRITE, lambda: None)
        elif is_watched and not is_wanted:
            self._selector.unregister(self._writing)

    def _read(self) -> None:
        data = os.read(self._reading, _READ_BYTES)
        if not data:
            self._lose("the coordinator is gone")
            return
        self._heard = time.monotonic()
        for message in self._messages.feed(data):
            self._take(message)

    def _take(self, message: Any) -> None:
        if isinstance(message, Ping):
            if message.heard >= 0:
                self._answered = message.heard
            self.send(Pong(sent=message.sent, now=time.time(), clock=time.monotonic()))
        elif isinstance(message, Publish | StartMember | EndMember | Over):
            if message.generation == self.generation:
                self.group.put(message)
        elif isinstance(message, Order):
            if message.generation == self.generation:
                self._inbox.post(message.number)
        elif isinstance(message, Answer):
            self._answer(message)
        elif isinstance(message, Enter):
            self.lease_seconds = message.lease_seconds
            self.work.put(message)
        elif isinstance(message, Start):
            # Before the main thread takes it: an order may follow at once.
            self.generation, self.group = message.generation, queue.SimpleQueue()
            self._goes_on = bool(message.members)
            self.work.put(message)
        else:
            self.work.put(message)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(_RANK_SECONDS)
        self._ranks[connection] = Messages(Ask)
        self._selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_READ_BYTES)
            asked = self._ranks[connection].feed(data) if data else []
        except (OSError, RunError):
            data, asked = b"", []
        if not data:
            self._selector.unregister(connection)
            del self._ranks[connection]
            connection.close()
            return
        for ask in asked:
            number = next(self._numbers)
            self._asked[number] = (connection, ask.number)
            self.send(msgspec.structs.replace(ask, number=number))

    def _answer(self, answer: Answer) -> None:
        connection, number = self._asked.pop(answer.number, (None, 0))
        if connection is None or connection not in self._ranks:
            return
        with contextlib.suppress(OSError):
            connection.sendall(encode(msgspec.structs.replace(answer, number=number)))
