"""Payloads that arrive in chunks: each is put in its place as it arrives, and nothing is kept of one that does not become whole.

Chunks of one message come in order over one connection, between other messages. The memory was checked against the operation's
limit when the message was announced; the kernel gives its pages only as chunks fill them. A payload of which no chunk came for
half a minute is dropped.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from shoal.comm.wire.buffers import CHUNK_BYTES, copy
from shoal.comm.wire.message import Chunk
from shoal.comm.wire.verdict import Dropped

MAX_STREAMS = 256
"""Payloads under way at once, of all senders."""
MAX_STREAMS_EACH = 32
"""Of one sender."""
IDLE_SECONDS = 30.0
"""How long the next chunk may take."""


@dataclass(eq=False, kw_only=True)
class Stream:
    """A payload that is under way."""

    target: memoryview
    finish: Callable[[], None]
    fail: Callable[[str], None]
    leave: Callable[[], object]
    """Takes this out of the table."""
    heard: float
    num_arrived: int = 0
    is_open: bool = True
    """False once it is whole or given up: its memory is not written to any more."""

    def arrive(self, num_bytes: int) -> None:
        """The next bytes are in their place."""
        self.num_arrived += num_bytes
        self.heard = time.monotonic()
        if self.num_arrived == self.target.nbytes:
            self.is_open = False
            self.leave()
            self.finish()

    def give_up(self) -> None:
        """It will not become whole."""
        if self.is_open:
            self.is_open = False
            self.leave()
            self.fail("incomplete")


class Streams:
    """The payloads that are under way to this socket."""

    def __init__(self) -> None:
        self._streams: dict[tuple[Hashable, int], Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def check_room(self, source: Hashable) -> None:
        """Ask whether one more payload may be announced.

        Raises:
            Dropped: ``busy``.
        """
        num_own = sum(1 for key in self._streams if key[0] == source)
        if len(self._streams) >= MAX_STREAMS or num_own >= MAX_STREAMS_EACH:
            text = f"{num_own} payloads of this sender are under way and {len(self._streams)} of all"
            raise Dropped("busy", f"{text}; the limits are {MAX_STREAMS_EACH} and {MAX_STREAMS}; try again")

    def open(
        self,
        source: Hashable,
        sequence: int,
        target: memoryview,
        *,
        finish: Callable[[], None],
        fail: Callable[[str], None],
    ) -> None:
        """A payload was announced.

        Args:
            source: the connection it comes over.
            sequence: of the message that announced it.
            target: memory of just its length.
            finish: called when it is whole.
            fail: called with a reason, once, when it will not become whole.
        """
        self.close(source, sequence)
        leave = partial(self._streams.pop, (source, sequence), None)
        stream = Stream(target=target, finish=finish, fail=fail, leave=leave, heard=time.monotonic())
        self._streams[source, sequence] = stream

    def find(self, source: Hashable, sequence: int) -> Stream | None:
        """The payload of a message, if it is under way."""
        return self._streams.get((source, sequence))

    def feed(self, source: Hashable, chunk: Chunk) -> None:
        """Put a chunk in its place.

        Raises:
            Dropped: ``unknown``, when no such payload is under way; ``payload``, when it is not the next chunk of it.
        """
        stream = self.find(source, chunk.sequence)
        if stream is None:
            raise Dropped("unknown", f"a chunk of message {chunk.sequence}, of which none is awaited")
        at = stream.num_arrived
        wanted = min(CHUNK_BYTES, stream.target.nbytes - at)
        if chunk.index * CHUNK_BYTES != at or chunk.data.nbytes != wanted:
            stream.give_up()
            raise Dropped(
                "payload", f"chunk {chunk.index} of {chunk.data.nbytes} bytes; due is byte {at}, {wanted} long"
            )
        copy(chunk.data, stream.target[at : at + wanted])
        stream.arrive(wanted)

    def close(self, source: Hashable, sequence: int) -> None:
        """A payload is not wanted any more, if it is under way."""
        stream = self.find(source, sequence)
        if stream is not None:
            stream.give_up()

    def expire(self) -> None:
        """Drop those of which nothing came for too long."""
        overdue = time.monotonic() - IDLE_SECONDS
        for source, sequence in [key for key, stream in self._streams.items() if stream.heard < overdue]:
            self.close(source, sequence)

    def close_all(self) -> None:
        """The socket closes."""
        for source, sequence in list(self._streams):
            self.close(source, sequence)
