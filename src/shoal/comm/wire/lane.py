"""A plain connection beside ZeroMQ's, for long payloads between processes of one machine that share no memory.

ZeroMQ receives into memory of its own, from which a payload is then copied, and wakes a second thread for every chunk. Here a
payload goes from one tensor's memory to the kernel and from there into the other's (``benchmarks/paramserver`` has what that is
worth). A lane carries plain bytes, so it exists only where ZeroMQ's stream would be plain too: on loopback without keys.

    message  lengths of header, body and payload; header, body, seal (``message.py``)
    chunk    length, checksum, bytes; and so on until the payload is whole; a length of 0 says that the rest will not come

What is wrong with the bytes of a chunk costs its payload; what is wrong with a length costs the lane, because the next cannot be
found.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import xxhash

from shoal.comm.wire.buffers import CHUNK_BYTES, CHUNKS_A_TURN
from shoal.comm.wire.counters import Counters
from shoal.comm.wire.header import HEADER_BYTES, PAYLOAD_BYTES
from shoal.comm.wire.message import BODY_BYTES, SEAL_BYTES, Frame
from shoal.comm.wire.operations import WORD_BYTES
from shoal.comm.wire.streams import Stream

_LENGTHS = struct.Struct("<IIQ")
_CHUNK = struct.Struct("<I8s")
_GIVEN_UP = _CHUNK.pack(0, b"\0" * 8)

Begin: TypeAlias = Callable[[list[memoryview], int], Stream | None]
"""Takes the frames of a message and the length of its payload; None when the payload is not wanted."""
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class LaneBroken(Exception):
    """The connection ended before a payload was sent."""


@dataclass(eq=False, kw_only=True)
class _Parcel:
    """A message that waits for its turn."""

    frames: list[Frame]
    payload: memoryview
    is_wanted: bool = True
    sent: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Lane:
    """One connection, used both ways; each way one payload at a time.

    Args:
        connection: connected; the lane closes it.
        begin: what becomes of a message that arrives.
        counters: of the node.
        spawn: starts a task that ends with the node.
        on_end: called once, when the connection has ended for whatever reason.
    """

    def __init__(
        self, connection: socket.socket, *, begin: Begin, counters: Counters, spawn: Spawn, on_end: Callable[[], object]
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_closed = False
        self._connection = connection
        self._begin = begin
        self._counters = counters
        self._on_end = on_end
        self._spawn = spawn
        self._parcels: deque[_Parcel] = deque()
        self._arriving: Stream | None = None
        self._scratch: memoryview | None = None
        self._writing: asyncio.Task[None] | None = None
        self._reading = spawn(self._read())

    async def send(self, frames: list[Frame], payload: memoryview) -> None:
        """Send a message and its payload. Returns when its memory may be changed; cancelled, the rest is not sent.

        Raises:
            LaneBroken: the connection ended first.
        """
        if self.is_closed:
            raise LaneBroken
        parcel = _Parcel(frames=frames, payload=payload)
        self._parcels.append(parcel)
        if self._writing is None:
            self._writing = self._spawn(self._write())
        try:
            await parcel.sent
        finally:
            parcel.is_wanted = False
            # The one that is being sent stays until it says that the rest will not come.
            if parcel in self._parcels and parcel is not self._parcels[0]:
                self._parcels.remove(parcel)

    def close(self) -> None:
        """End the connection. Payloads that have not arrived whole are given up."""
        if self.is_closed:
            return
        self.is_closed = True
        # A task that waits for the connection would wait for ever for one that is closed.
        for task in (self._reading, self._writing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for parcel in self._parcels:
            if not parcel.sent.done():
                parcel.sent.set_exception(LaneBroken())
                parcel.sent.exception()  # Whoever waits sees it; asyncio need not complain if nobody does.
        self._parcels.clear()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connection)
        loop.remove_writer(self._connection)
        self._connection.close()
        if self._arriving is not None:
            self._arriving.give_up()
        self._on_end()

    async def _write(self) -> None:
        try:
            while self._parcels:
                parcel = self._parcels[0]
                if parcel.is_wanted:
                    await self._write_parcel(parcel)
                if not parcel.sent.done():
                    parcel.sent.set_result(None)
                self._parcels.popleft()
        except OSError:
            self.close()
        finally:
            self._writing = None

    async def _write_parcel(self, parcel: _Parcel) -> None:
        frames, payload = parcel.frames, parcel.payload
        lengths = _LENGTHS.pack(len(frames[0]), len(frames[1]), payload.nbytes)
        await self._write_all([lengths, *frames])
        for index, at in enumerate(range(0, payload.nbytes, CHUNK_BYTES)):
            if not parcel.is_wanted:
                await self._write_all([_GIVEN_UP])
                return
            chunk = payload[at : at + CHUNK_BYTES]
            await self._write_all([_CHUNK.pack(chunk.nbytes, _checksum(chunk, at)), chunk])
            if index % CHUNKS_A_TURN == 0:
                await asyncio.sleep(0)

    async def _write_all(self, parts: list[Frame]) -> None:
        while parts:
            try:
                sent = self._connection.sendmsg(parts)
            except BlockingIOError:
                await self._wait(asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts[0])
                del parts[0]
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    async def _read(self) -> None:
        try:
            while True:
                await self._read_message()
        except OSError:
            pass  # Closed by the other side, in whatever way, or broken off here.
        finally:
            # Whatever it was: a lane that nobody reads would hold up calls until their deadlines.
            self.close()

    async def _read_message(self) -> None:
        num_header, num_body, num_payload = _LENGTHS.unpack(await self._read_bytes(_LENGTHS.size))
        is_possible = (
            num_header <= HEADER_BYTES and num_body <= BODY_BYTES and CHUNK_BYTES < num_payload <= PAYLOAD_BYTES
        )
        if not is_possible:
            self._counters.add("received")
            self._counters.add("frames")
            raise ConnectionError("lengths that no message has")
        whole = memoryview(await self._read_bytes(num_header + num_body + SEAL_BYTES))
        frames = [whole[:num_header], whole[num_header:-SEAL_BYTES], whole[-SEAL_BYTES:]]
        self._arriving = self._begin(frames, num_payload)
        try:
            await self._read_payload(num_payload)
        finally:
            if self._arriving is not None:
                self._arriving.give_up()
            self._arriving = None

    async def _read_payload(self, num_payload: int) -> None:
        for index, at in enumerate(range(0, num_payload, CHUNK_BYTES)):
            length, checksum = _CHUNK.unpack(await self._read_bytes(_CHUNK.size))
            if not length:
                return
            if length != min(CHUNK_BYTES, num_payload - at):
                raise ConnectionError("a chunk of a wrong length")
            await self._read_chunk(at, length, checksum)
            if index % CHUNKS_A_TURN == 0:
                await asyncio.sleep(0)

    async def _read_chunk(self, at: int, length: int, checksum: bytes) -> None:
        num_read = 0
        while num_read < length:
            # Asked anew each time: the call may have ended meanwhile, and its memory is its owner's again.
            stream = self._arriving
            memory = self._waste() if stream is None or not stream.is_open else stream.target[at : at + length]
            num_read += await self._receive(memory[num_read:length])
        stream = self._arriving
        if stream is None or not stream.is_open:
            return
        self._counters.add("received")
        # A chunk of it that came in a message of ZeroMQ's has no business there, and would leave a gap at the end.
        is_next = stream.num_arrived == at
        if is_next and _checksum(stream.target[at : at + length], at) == checksum:
            self._counters.add("accepted")
            stream.arrive(length)
        else:
            self._counters.add("corrupt")
            stream.give_up()

    def _waste(self) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(CHUNK_BYTES))
        return self._scratch

    async def _read_bytes(self, length: int) -> bytearray:
        found = bytearray(length)
        num_read = 0
        while num_read < length:
            num_read += await self._receive(memoryview(found)[num_read:])
        return found

    async def _receive(self, memory: memoryview) -> int:
        """Receive what is there; 0 when nothing was, after waiting until something is."""
        try:
            num_read = self._connection.recv_into(memory)
        except BlockingIOError:
            await self._wait(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)
            return 0
        if not num_read:
            raise ConnectionError("the other side closed the lane")
        return num_read

    async def _wait(self, watch: Callable[..., None], unwatch: Callable[[socket.socket], bool]) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch(self._connection, partial(_wake, ready))
        try:
            await ready
        finally:
            if not self.is_closed:
                unwatch(self._connection)


async def hear_word(connection: socket.socket) -> bytes:
    """The first bytes of a connection: the word by which one side knows the other.

    Raises:
        ConnectionError: it ended before.
    """
    word = b""
    while len(word) < WORD_BYTES:
        part = await asyncio.get_running_loop().sock_recv(connection, WORD_BYTES - len(word))
        if not part:
            raise ConnectionError("closed before it said its word")
        word += part
    return word


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _checksum(chunk: memoryview, at: int) -> bytes:
    # With its place in the payload: a chunk that comes where another is due is seen.
    return xxhash.xxh3_64_digest(chunk, seed=at)
