"""How payloads leave and enter a node: in shared memory, inside their message, or in chunks behind it.

Chunks of one message come in order over one connection, between other messages (``Streams``). Each is put in its place as it
arrives, and nothing is kept of a payload that does not become whole. Its memory was checked against the operation's limit when
the message was announced; the kernel gives its pages only as chunks fill them. A payload of which no chunk came for half a minute
is dropped.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shoal.comm.wire.arena import SHARED_BYTES, Arenas, Borrowed, identify_folder
from shoal.comm.wire.buffers import CHUNK_BYTES, SpareBuffers, copy
from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.message import Chunk, Envelope, Header

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


class Payloads:
    """The memory of one node.

    Args:
        instance_id: of the node.
        arena_dir: the folder of arenas; without one no payload is shared.

    Raises:
        RequestError: the folder is missing, or others can write there.
    """

    def __init__(self, instance_id: str, arena_dir: Path | None) -> None:
        self.folder = ""
        """What the node's headers say about the folder of arenas."""
        self._arenas: Arenas | None = None
        self._borrowed: Borrowed | None = None
        if arena_dir is not None:
            self.folder = identify_folder(arena_dir)
            self._arenas = Arenas(arena_dir, instance_id)
            self._borrowed = Borrowed(arena_dir)
        self._spare = SpareBuffers()
        self._is_closed = False

    async def share(self, header: Header, payload: memoryview, receiver: object) -> Header:
        """The header with the place where the payload is now; unchanged when it is short, or there is no room."""
        if self._arenas is None or payload.nbytes < SHARED_BYTES:
            return header
        place = await self._arenas.put(payload, header.sequence, receiver)
        return header if place is None else replace(header, place=place)

    def view(self, envelope: Envelope, on_taken: Callable[[], None]) -> memoryview:
        """The payload of a message that is in shared memory.

        Args:
            envelope: the message.
            on_taken: called by the event loop when nothing refers to the payload any more.

        Raises:
            Dropped: ``place``.
        """
        header = envelope.header
        assert header.place is not None
        if self._borrowed is None or header.folder != self.folder:
            raise Dropped("place", "this process does not see the sender's folder of arenas", header)
        tell = partial(self._tell, asyncio.get_running_loop(), on_taken)
        try:
            return self._borrowed.view(header.place, header.sender, tell)
        except Dropped as drop:
            drop.header = header
            raise

    def room(self, envelope: Envelope) -> memoryview:
        """Memory for a payload of a length that was checked.

        Raises:
            Dropped: ``busy``, when there is not so much.
        """
        try:
            return self._spare.take(envelope.num_bytes)
        except MemoryError as error:
            text = f"there is no memory for a payload of {envelope.num_bytes} bytes here; try again"
            raise Dropped("busy", text, envelope.header) from error

    def inline(self, envelope: Envelope, into: memoryview | None = None) -> memoryview | None:
        """The payload that is inside a message; it may be empty, or there may be none."""
        if not envelope.header.has_payload:
            return None
        target = self.room(envelope) if into is None else into
        if envelope.inline is not None:
            copy(envelope.inline, target)
        return target

    def give_back(self, sequence: int, name: str, receiver: object) -> bool:
        """See ``Arenas.give_back``."""
        return self._arenas is not None and self._arenas.give_back(sequence, name, receiver)

    def abandon(self, sequence: int) -> None:
        """See ``Arenas.abandon``."""
        if self._arenas is not None:
            self._arenas.abandon(sequence)

    def forget(self, sender: str) -> None:
        """Let go of the memory of an instance that is gone."""
        if self._borrowed is not None:
            self._borrowed.forget(sender)

    def close(self) -> None:
        """Remove every file of this process; what others have mapped, and what is still referred to here, stays readable."""
        self._is_closed = True
        if self._arenas is not None:
            self._arenas.close()
        if self._borrowed is not None:
            self._borrowed.close()

    def _tell(self, loop: asyncio.AbstractEventLoop, on_taken: Callable[[], None]) -> None:
        # Whatever thread dropped the last reference is here, perhaps when the loop has ended.
        if not self._is_closed:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(on_taken)
