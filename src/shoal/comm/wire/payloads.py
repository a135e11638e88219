"""How payloads leave and enter a node: in shared memory, inside their message, or in chunks behind it."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shoal.comm.wire.arena import SHARED_BYTES, Arenas, Borrowed, identify_folder
from shoal.comm.wire.buffers import SpareBuffers, copy
from shoal.comm.wire.header import Header
from shoal.comm.wire.message import Envelope
from shoal.comm.wire.verdict import Dropped


class Payloads:
    """The memory of one node.

    Args:
        incarnation: of the node.
        arena_dir: the folder of arenas; without one no payload is shared.

    Raises:
        RequestError: the folder is missing, or others can write there.
    """

    def __init__(self, incarnation: str, arena_dir: Path | None) -> None:
        self.folder = ""
        """What the node's headers say about the folder of arenas."""
        self._arenas: Arenas | None = None
        self._borrowed: Borrowed | None = None
        if arena_dir is not None:
            self.folder = identify_folder(arena_dir)
            self._arenas = Arenas(arena_dir, incarnation)
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
        """Let go of the memory of an incarnation that is gone."""
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
