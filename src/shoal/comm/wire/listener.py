"""One address that this process listens on: admits what arrives, hands it to the handler, and sends the answers.

A handler runs as a task of its own, so a slow one holds nobody up; nor does a client that does not read its answers.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import zmq

from shoal.comm.wire.addresses import Address
from shoal.comm.wire.buffers import Payload
from shoal.comm.wire.connections import ConnectionLimit
from shoal.comm.wire.header import REFUSED, TAKEN, Header
from shoal.comm.wire.message import Envelope, is_chunk, unpack, unpack_chunk
from shoal.comm.wire.operations import Refusal
from shoal.comm.wire.pump import Pump
from shoal.comm.wire.request import Request
from shoal.comm.wire.streams import Streams
from shoal.comm.wire.verdict import Dropped
from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from shoal.comm.wire.node import Node

Handler: TypeAlias = Callable[[Request], Awaitable[None]]
_RUNNING = 1024
"""Handlers at work at once; the next request is refused as ``busy``. Parked requests do not count."""
_TOLD = frozenset(
    {"version", "unknown", "oversized", "payload", "place", "stale", "behind", "busy", "malformed", "incomplete"}
)
"""Reasons that the sender is told, when its header was whole. A duplicate's first copy is answered anyway."""
_TELL_SECONDS = 1.0
_TIDY_SECONDS = 5.0


class Listener:
    """A bound ROUTER socket."""

    def __init__(
        self,
        node: "Node",
        router: "zmq.Socket[bytes]",
        address: Address,
        handler: Handler,
        *,
        shares: bool,
        limit: ConnectionLimit | None = None,
    ) -> None:
        self._node = node
        self._address = address
        self._shares = shares
        self._handler = handler
        self._limit = limit
        self._num_running = 0
        self._streams = Streams()
        # So that only this socket's file is removed, and not that of a successor on the same path.
        self._file = os.stat(address.path).st_ino if address.kind == "ipc" else None
        self._pump = Pump(router, self._receive)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_TIDY_SECONDS, self._tidy)

    async def send_answer(
        self, request: Request, operation: str, body: msgspec.Struct, payload: Payload | None
    ) -> None:
        """Send an answer; see ``Request.answer``."""
        if request.remaining:
            await self._send(request.route, request.header, operation, body, payload, seconds=request.remaining)
        else:
            self._node.counters.add("expired")

    def close(self) -> None:
        """Stop listening; requests at work are not answered any more."""
        self._timer.cancel()
        self._streams.close_all()
        if self._limit is not None:
            self._limit.stop()
        self._pump.close()
        if self._file is not None and self._address.path.exists() and self._address.path.stat().st_ino == self._file:
            self._address.path.unlink(missing_ok=True)

    def _receive(self, frames: list[zmq.Frame]) -> None:
        """Take one message that arrived. Nothing that it holds can make this fail."""
        counters = self._node.counters
        counters.add("received")
        if self._limit is not None:
            self._limit.note_spoken(frames[-1])
        route, parts = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        try:
            if is_chunk(parts):
                self._streams.feed(route, unpack_chunk(parts))
                counters.add("accepted")
            else:
                self._admit(route, unpack(parts))
        except Dropped as drop:
            self._drop(route, drop)

    def _admit(self, route: bytes, envelope: Envelope) -> None:
        header = envelope.header
        if header.operation == TAKEN:
            self._node.take_note(header, route)
            self._node.counters.add("accepted")
            return
        body = self._check(route, envelope)
        payload = None
        if header.place is not None:
            payload = self._node.payloads.view(envelope, partial(self._return, route, header))
        if not self._node.windows.note(header.sender, header.sequence):
            raise Dropped("duplicate", "seen before", header)
        if envelope.is_stream:
            target = self._node.payloads.room(envelope)
            request = Request(self, route, header, body, target)
            finish, fail = partial(self._accept, request), partial(self._fail, route, header)
            self._streams.open(route, header.sequence, target, finish=finish, fail=fail)
            return
        if header.place is None:
            payload = self._node.payloads.inline(envelope)
        self._accept(Request(self, route, header, body, payload))

    def _check(self, route: bytes, envelope: Envelope) -> object:
        """The body of a request that may be carried out.

        Raises:
            Dropped: it may not.
        """
        node, header = self._node, envelope.header
        if header.answers != -1 or header.operation not in node.operations:
            raise Dropped("unknown", f"no operation {header.operation!r} here", header)
        op = node.operations[header.operation]
        op.check_sizes(envelope)
        if node.windows.is_seen(header.sender, header.sequence):
            raise Dropped("duplicate", "seen before", header)
        if op.fenced and header.epoch < node.epoch:
            reason = "behind" if header.sender in node.members else "stale"
            raise Dropped(reason, f"sent under epoch {header.epoch}; it is {node.epoch} now", header)
        try:
            if self._num_running >= _RUNNING:
                raise Dropped("busy", f"{self._num_running} requests at work, the limit is {_RUNNING}; try again")
            if envelope.is_stream:
                self._streams.check_room(route)
            return node.operations.decode_request(header.operation, envelope.body)
        except Dropped as drop:
            drop.header = header
            raise

    def _accept(self, request: Request) -> None:
        self._node.counters.add("accepted")
        self._num_running += 1
        task = self._node.spawn(self._handle(request))
        task.add_done_callback(partial(self._finish, request))

    def _fail(self, route: bytes, header: Header, reason: str) -> None:
        self._drop(route, Dropped(reason, "not every chunk of the payload came", header))

    def _drop(self, route: bytes, drop: Dropped) -> None:
        self._node.counters.add(drop.reason)
        header = drop.header
        if header is not None and header.answers == -1 and drop.reason in _TOLD and not self._pump.is_closed:
            refusal = Refusal(drop.reason, drop.text)
            self._node.spawn(self._send(route, header, REFUSED, refusal, None, seconds=_TELL_SECONDS))

    async def _handle(self, request: Request) -> None:
        try:
            await self._handler(request)
        except ShoalError as error:
            self._node.counters.add("failed")
            if request.is_open:
                await request.refuse("failed", str(error))

    def _finish(self, request: Request, task: "asyncio.Task[None]") -> None:
        self._num_running -= 1
        if task.cancelled() or task.exception() is None:
            return
        # A mistake of ours: shown where the process shows such, and the one who asked need not wait for its deadline.
        self._node.counters.add("failed")
        context = {"message": f"the handler of {request} failed", "exception": task.exception(), "task": task}
        task.get_loop().call_exception_handler(context)
        if request.is_open and not self._pump.is_closed:
            self._node.spawn(request.refuse("broken", f"{type(task.exception()).__name__} in the handler; see its log"))

    async def _send(
        self,
        route: bytes,
        asked: Header,
        operation: str,
        body: msgspec.Struct,
        payload: Payload | None,
        *,
        seconds: float,
    ) -> None:
        node = self._node
        folder = asked.folder if self._shares else ""
        outgoing = None
        try:
            async with asyncio.timeout(seconds):
                outgoing = await node.compose(
                    operation, body, payload, answers=asked.sequence, receiver=route, folder=folder
                )
                # Copied, if the payload is inside: who answers may change its memory as soon as this returns.
                await self._pump.send([route, *outgoing.frames], copy=outgoing.stream is None)
                is_copied = self._address.kind == "inproc"
                await node.send_chunks(self._pump, outgoing, route=route, is_copied=is_copied, track=True)
        except TimeoutError:
            node.counters.add("expired")
        except Dropped as drop:
            node.counters.add("failed")
            await self._send(route, asked, REFUSED, Refusal(drop.reason, drop.text), None, seconds=seconds)
        except zmq.ZMQError:
            # Whoever asked is gone, or this socket was closed.
            node.counters.add("gone")
            if outgoing is not None:
                node.payloads.abandon(outgoing.sequence)

    def _return(self, route: bytes, header: Header) -> None:
        """Nobody refers to the payload of a request any more."""
        self._node.send_taken(self._pump, header, route=route)

    def _tidy(self) -> None:
        self._streams.expire()
        self._timer = self._loop.call_later(_TIDY_SECONDS, self._tidy)
