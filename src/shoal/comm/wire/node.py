"""This process on the wire: what it listens on, whom it calls, and what both share.

    node = Node(instance_id=new_instance_id(), operations=OPERATIONS)
    address = await node.listen("ipc:///run/s.sock", handle)
    answer = await node.connect(address).call(Pull(shard=0, need=3), deadline=5.0, into=weights)

Everything here belongs to one event loop and is called from its thread.
"""

import asyncio
import os
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shoal.comm.wire.addresses import Address, parse_address
from shoal.comm.wire.buffers import CHUNK_BYTES, CHUNKS_A_TURN, Payload, describe
from shoal.comm.wire.connections import ConnectionLimit
from shoal.comm.wire.errors import Counters, Dropped
from shoal.comm.wire.keys import Authenticator, Keys
from shoal.comm.wire.listener import Deduplication, Handler, Listener
from shoal.comm.wire.message import BODY_BYTES, PROTOCOL_VERSION, TAKEN, Frame, Header, pack, pack_chunk
from shoal.comm.wire.operations import Operations, Taken
from shoal.comm.wire.payloads import Payloads
from shoal.comm.wire.peer import Peer
from shoal.comm.wire.sockets import AsyncSocket, acquire_context, open_socket, release_context
from shoal.core.errors import RequestError

_SENT_POLL_SECONDS = 0.0005


def new_instance_id() -> str:
    """A name for this start of this process that no other start has: 16 hexadecimal digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A message that is ready to be sent."""

    sequence: int
    frames: list[Frame]
    stream: memoryview | None
    """The payload that follows in chunks."""


class Node:
    """This process on the wire.

    Args:
        instance_id: this start of this process, from ``new_instance_id()``.
        operations: what may be asked and answered here.
        keys: with them every tcp connection is encrypted and both ends are known; without, tcp stays on loopback.
        arena_dir: a folder in memory (under /dev/shm, mode 0700) that all processes of the run on this machine share.

    Raises:
        RequestError: the folder of arenas is missing, or others can write there.
    """

    def __init__(
        self, *, instance_id: str, operations: Operations, keys: Keys | None = None, arena_dir: Path | None = None
    ) -> None:
        self.instance_id = instance_id
        self.operations = operations
        self.epoch = 0
        """Stamped on everything that is sent; a fenced request that was sent under a lower one is refused."""
        self.members: frozenset[str] = frozenset()
        """Instances that belong to the epoch, where the room above knows them."""
        self.counters = Counters()
        self.deduplication = Deduplication()
        self.payloads = Payloads(instance_id, arena_dir)
        self.num_sent = 0
        self._keys = keys
        self._authenticator: Authenticator | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._listeners: list[Listener] = []
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def listen(self, address: str, handler: Handler) -> str:
        """Listen on ``address`` and give every request to ``handler``.

        Returns:
            The address to connect to: with the real port for port 0, and with this node's public key where it has one.

        Raises:
            RequestError: no such address, it is taken, or it leaves this machine without keys.
        """
        parsed = parse_address(address, has_keys=self._keys is not None)
        keys = self._keys if parsed.kind == "tcp" else None
        socket = open_socket(self._use_context(), zmq.ROUTER, is_tcp=parsed.kind == "tcp")
        limit = None
        if keys is not None:
            self._start_authenticator(keys)
            keys.secure_listener(socket)
            limit = ConnectionLimit(self._use_context(), socket)
        # The file of an ipc socket is this user's from its first moment: who connects before a chmod stays connected.
        mask = os.umask(0o077)
        try:
            socket.bind(parsed.endpoint)
        except zmq.ZMQError as error:
            if limit is not None:
                limit.stop()
            socket.close(linger=0)
            raise RequestError(f"cannot listen on {address}: {error}") from error
        finally:
            os.umask(mask)
        if parsed.kind == "ipc":
            os.chmod(parsed.path, 0o600)
        self._listeners.append(Listener(self, socket, parsed, handler, shares=self._shares(parsed), limit=limit))
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return endpoint if keys is None else f"{endpoint}#{keys.public_hex}"

    def connect(self, address: str) -> Peer:
        """The peer at ``address``; the same one until it is closed. Nothing is sent before its first call.

        Raises:
            RequestError: no such address, or it leaves this machine without keys.
        """
        assert not self._is_closed
        if address not in self._peers:
            parsed = parse_address(address, has_keys=self._keys is not None)
            self._peers[address] = Peer(self, address, parsed, shares=self._shares(parsed))
        return self._peers[address]

    async def close(self) -> None:
        """End all calls, stop listening, and leave nothing behind. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for peer in list(self._peers.values()):
            await peer.close()
        for listener in self._listeners:
            listener.close()
        # A handler may be the one that closes its node.
        others = {task for task in self._tasks if task is not asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        self.payloads.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._context is not None:
            release_context(self._context)

    def forget(self, sender: str) -> None:
        """Drop what is remembered of an instance that is gone for good."""
        self.deduplication.forget(sender)
        self.payloads.forget(sender)

    # What follows is for listeners and peers.

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run ``work`` as a task that ends with this node."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def forget_peer(self, peer: Peer) -> None:
        """A peer was closed."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]

    def open_dealer(self, address: Address) -> "zmq.Socket[bytes]":
        """A socket to connect to ``address``."""
        socket = open_socket(self._use_context(), zmq.DEALER, is_tcp=address.kind == "tcp")
        if address.kind == "tcp" and self._keys is not None:
            self._keys.secure_caller(socket, address.key)
        return socket

    async def compose(
        self,
        operation: str,
        body: msgspec.Struct,
        payload: Payload | None,
        *,
        receiver: object,
        folder: str,
        answers: int = -1,
        key: str = "",
        deadline: float = 0.0,
    ) -> Outgoing:
        """A message of this node, its payload in shared memory if the receiver sees this node's folder of arenas.

        Raises:
            Dropped: ``oversized``; a frame above the limit would end the connection, and its sender would not know why.
        """
        encoded = self.operations.encode(body)
        if len(encoded) > BODY_BYTES:
            raise Dropped("oversized", f"{operation}: a body of {len(encoded)} bytes; the limit is {BODY_BYTES}")
        view, dtype, shape = (None, "", ()) if payload is None else describe(payload)
        header = self._header(operation, answers=answers, key=key, dtype=dtype, shape=shape, deadline=deadline)
        if view is not None and folder and folder == self.payloads.folder:
            header = await self.payloads.share(header, view, receiver)
        is_stream = view is not None and header.place is None and view.nbytes > CHUNK_BYTES
        frames = pack(header, encoded, view)
        return Outgoing(sequence=header.sequence, frames=frames, stream=view if is_stream else None)

    async def send_chunks(
        self,
        async_socket: AsyncSocket,
        outgoing: Outgoing,
        *,
        is_copied: bool,
        route: bytes | None = None,
        track: bool = False,
    ) -> None:
        """Send the chunks of a payload, if it follows its message.

        Args:
            async_socket: the socket.
            outgoing: the message.
            is_copied: True when the payload's memory must not be seen by the receiver.
            route: the receiver, for a ROUTER.
            track: wait until ZeroMQ has read the payload's memory, which may be changed then.
        """
        if outgoing.stream is None:
            return
        address = [] if route is None else [route]
        tracker: zmq.MessageTracker | None = None
        for index, at in enumerate(range(0, outgoing.stream.nbytes, CHUNK_BYTES)):
            chunk = pack_chunk(outgoing.sequence, index, outgoing.stream[at : at + CHUNK_BYTES])
            # They leave in order: when the last one has left, all have.
            is_tracked = track and not is_copied and at + CHUNK_BYTES >= outgoing.stream.nbytes
            tracker = await async_socket.send([*address, *chunk], copy=is_copied, track=is_tracked)
            if index % CHUNKS_A_TURN == 0:
                await asyncio.sleep(0)
        while tracker is not None and not tracker.done:
            await asyncio.sleep(_SENT_POLL_SECONDS)

    def send_taken(self, async_socket: AsyncSocket, taken: Header, *, route: bytes | None = None) -> None:
        """Say that the payload of message ``taken`` is not needed any more; when that is lost, its owner makes do."""
        assert taken.place is not None
        if async_socket.is_closed:
            return
        name = taken.place.name
        header = self._header(TAKEN, answers=taken.sequence, key=name, dtype="", shape=(), deadline=0.0)
        frames = pack(header, self.operations.encode(Taken()), None)
        try:
            async_socket.try_send(frames if route is None else [route, *frames])
        except zmq.ZMQError:
            self.counters.add("gone")

    def take_note(self, header: Header, receiver: object) -> None:
        """The other side says that it does not need a payload any more.

        Raises:
            Dropped: ``unknown``, when it was not lent to this receiver.
        """
        if not self.payloads.give_back(header.answers, header.key, receiver):
            raise Dropped("unknown", "nothing was lent")

    def _header(
        self, operation: str, *, answers: int, key: str, dtype: str, shape: tuple[int, ...], deadline: float
    ) -> Header:
        sequence = self.num_sent
        self.num_sent += 1
        return Header(
            version=PROTOCOL_VERSION,
            epoch=self.epoch,
            sender=self.instance_id,
            sequence=sequence,
            operation=operation,
            answers=answers,
            key=key,
            dtype=dtype,
            shape=shape,
            deadline=deadline,
            place=None,
            folder=self.payloads.folder,
        )

    def _shares(self, address: Address) -> bool:
        """True when payloads to this address may lie in shared memory: both ends are here, and nobody asked for encryption."""
        return address.is_local and (address.kind == "ipc" or self._keys is None)

    def _use_context(self) -> "zmq.Context[zmq.Socket[bytes]]":
        assert not self._is_closed
        if self._context is None:
            self._context = acquire_context(own=self._keys is not None)
        return self._context

    def _start_authenticator(self, keys: Keys) -> None:
        if self._authenticator is None:
            self._authenticator = Authenticator(self._use_context(), keys)
