"""One address that this process listens on: the listener admits what arrives, hands it to the handler, and sends the answers.

A handler runs as a task of its own, so a slow one delays no other request; nor does a client that does not read its answers.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import zmq

from shoal.comm.wire.addresses import Address
from shoal.comm.wire.buffers import Payload
from shoal.comm.wire.connections import ConnectionLimit
from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.message import REFUSED, TAKEN, Envelope, Header, is_chunk, unpack, unpack_chunk
from shoal.comm.wire.operations import Refusal
from shoal.comm.wire.payloads import Streams
from shoal.comm.wire.sockets import AsyncSocket
from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from shoal.comm.wire.node import Node

WINDOW = 4096
"""Numbers below the highest that are told apart."""
SENDERS = 4096
"""Senders that are remembered."""
_MASK = (1 << WINDOW) - 1


class Deduplication:
    """Which messages were seen: a bounded window of sequence numbers for each sender, and a bounded number of senders.

    A sender counts its messages, whatever their receiver, so its numbers reach one receiver in rising order with gaps. A window
    is the highest number seen and a bit for each of the ``WINDOW`` numbers below it; an older number counts as seen. The sender
    that was silent longest is forgotten first.
    """

    def __init__(self, *, max_senders: int = SENDERS) -> None:
        self._max_senders = max_senders
        # Bit k stands for the number ``highest - k``.
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def is_seen(self, sender: str, sequence: int) -> bool:
        """True when this message was noted before, or is too old to tell."""
        if sender not in self._seen:
            return False
        highest, bits = self._seen[sender]
        age = highest - sequence
        return age >= WINDOW or (age >= 0 and bool(bits >> age & 1))

    def note(self, sender: str, sequence: int) -> bool:
        """Note this message; False when it was seen before."""
        if self.is_seen(sender, sequence):
            return False
        highest, bits = self._seen.get(sender, (sequence, 0))
        if sequence > highest:
            bits = (bits << (sequence - highest)) & _MASK if sequence - highest < WINDOW else 0
            highest = sequence
        self._seen[sender] = (highest, bits | 1 << (highest - sequence))
        self._seen.move_to_end(sender)
        while len(self._seen) > self._max_senders:
            self._seen.popitem(last=False)
        return True

    def forget(self, sender: str) -> bool:
        """Drop a sender that is gone for good; False when it was not known."""
        return self._seen.pop(sender, None) is not None


class Request:
    """A request that arrived, to be answered or refused once, now or much later.

    One that is never answered costs its sender the whole deadline.
    """

    def __init__(
        self, listener: "Listener", route: bytes, header: Header, body: Any, payload: memoryview | None
    ) -> None:
        self._listener = listener
        self.route = route
        """The connection that it came over."""
        self._is_open = True
        self._expires = time.monotonic() + header.deadline
        self.header = header
        self.body = body
        """The struct of the operation."""
        self.payload = payload
        """The payload's bytes, or None. They stay as they are for as long as anything refers to them."""

    def __repr__(self) -> str:
        return f"Request({self.operation} {self.key!r} from {self.sender}, epoch {self.epoch})"

    @property
    def sender(self) -> str:
        """The instance of the one who asks."""
        return self.header.sender

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return self.header.operation

    @property
    def key(self) -> str:
        """What the request is about."""
        return self.header.key

    @property
    def epoch(self) -> int:
        """The epoch of the one who asks, when it asked."""
        return self.header.epoch

    @property
    def remaining(self) -> float:
        """Seconds that the one who asks will still wait; not below 0."""
        return max(0.0, self._expires - time.monotonic())

    @property
    def is_open(self) -> bool:
        """True while it is neither answered nor refused, and its sender still waits for it."""
        return self._is_open and self.remaining > 0

    async def answer(self, body: msgspec.Struct, payload: Payload | None = None) -> None:
        """Answer. Returns when the payload's memory may be changed again, or when nobody waits any more.

        Args:
            body: of the operation's answer type.
            payload: a torch tensor, a numpy array or bytes; contiguous.
        """
        self._settle()
        await self._listener.send_answer(self, self.operation, body, payload)

    async def refuse(self, code: str, text: str) -> None:
        """Say no: the call that asked ends with ``Refused``.

        Args:
            code: a word that programs compare.
            text: one sentence for people, with the numbers and the fix.
        """
        self._settle()
        await self._listener.send_answer(self, REFUSED, Refusal(code, text), None)

    def _settle(self) -> None:
        assert self._is_open, f"{self} was answered before"
        self._is_open = False


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
        self._async_socket = AsyncSocket(router, self._receive)
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
        self._async_socket.close()
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
        if not self._node.deduplication.note(header.sender, header.sequence):
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
        if node.deduplication.is_seen(header.sender, header.sequence):
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
        if header is not None and header.answers == -1 and drop.reason in _TOLD and not self._async_socket.is_closed:
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
        if request.is_open and not self._async_socket.is_closed:
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
                await self._async_socket.send([route, *outgoing.frames], copy=outgoing.stream is None)
                is_copied = self._address.kind == "inproc"
                await node.send_chunks(self._async_socket, outgoing, route=route, is_copied=is_copied, track=True)
        except TimeoutError:
            node.counters.add("expired")
        except Dropped as drop:
            node.counters.add("failed")
            await self._send(route, asked, REFUSED, Refusal(drop.reason, drop.text), None, seconds=seconds)
        except zmq.ZMQError:
            # The sender is gone, or this socket was closed.
            node.counters.add("gone")
            if outgoing is not None:
                node.payloads.abandon(outgoing.sequence)

    def _return(self, route: bytes, header: Header) -> None:
        """Nobody refers to the payload of a request any more."""
        self._node.send_taken(self._async_socket, header, route=route)

    def _tidy(self) -> None:
        self._streams.expire()
        self._timer = self._loop.call_later(_TIDY_SECONDS, self._tidy)
