"""Where lanes arrive: a plain port of its own beside a listener's, and a word by which a lane is known to belong to a connection.

Whoever is connected asks for a word (``!lane``), connects to the port, says it, and hears another that nobody else knows. A word
is good once and for a few seconds; a connection that does not begin with one is closed. Nothing is kept for strangers but a few
connections that have not spoken yet.
"""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable

from shoal.comm.wire.lane import Spawn, hear_word
from shoal.comm.wire.operations import WORD_BYTES, LaneOffer
from shoal.comm.wire.verdict import Dropped

_WORD_SECONDS = 10.0
_MAX_WORDS = 1024
_MAX_SILENT = 64
"""Connections that have not said their word."""
_PAUSE_SECONDS = 1.0
"""After an accept that failed: out of descriptors, it would fail again at once, and again."""


class Dock:
    """A listening socket on the host of its listener.

    Args:
        host: an address of loopback.
        spawn: starts a task that ends with the node.
        admit: takes the connection that belongs to a route; it is the receiver's to close.
    """

    def __init__(self, host: str, *, spawn: Spawn, admit: Callable[[bytes, socket.socket], None]) -> None:
        self._spawn = spawn
        self._admit = admit
        self._words: dict[bytes, tuple[bytes, bytes, float]] = {}
        self._num_silent = 0
        self._admitted: set[socket.socket] = set()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.create_server((host, 0), backlog=_MAX_SILENT)
        self._socket.setblocking(False)
        self._is_closed = False
        self._watch()

    def offer(self, route: bytes) -> LaneOffer:
        """Where ``route`` may connect a lane to, and the word it has to say there.

        Raises:
            Dropped: ``busy``.
        """
        now = time.monotonic()
        self._words = {word: entry for word, entry in self._words.items() if entry[2] > now}
        if len(self._words) >= _MAX_WORDS:
            raise Dropped("busy", f"{_MAX_WORDS} lanes are being opened; try again")
        word, reply = secrets.token_bytes(WORD_BYTES), secrets.token_bytes(WORD_BYTES)
        self._words[word] = (route, reply, now + _WORD_SECONDS)
        return LaneOffer(self._socket.getsockname()[1], word, reply)

    def close(self) -> None:
        """Stop listening."""
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _watch(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return  # Gone again.
        except OSError:
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_PAUSE_SECONDS, self._watch)
            return
        if self._num_silent >= _MAX_SILENT:
            connection.close()
            return
        connection.setblocking(False)
        self._num_silent += 1
        # Closed by whoever ends it, also before its first turn.
        self._spawn(self._greet(connection)).add_done_callback(lambda _: self._leave(connection))

    async def _greet(self, connection: socket.socket) -> None:
        route = None
        try:
            async with asyncio.timeout(_WORD_SECONDS):
                found = self._recognise(await hear_word(connection))
                if found is not None:
                    await self._loop.sock_sendall(connection, found[1])
                    route = found[0]
        except (TimeoutError, OSError):
            pass
        if route is not None:
            self._admitted.add(connection)
            self._admit(route, connection)

    def _leave(self, connection: socket.socket) -> None:
        self._num_silent -= 1
        if connection in self._admitted:
            self._admitted.discard(connection)
        else:
            connection.close()

    def _recognise(self, word: bytes) -> tuple[bytes, bytes] | None:
        route, reply, until = self._words.pop(word, (b"", b"", 0.0))
        return (route, reply) if until > time.monotonic() else None
