"""The other end of an address: calls that end with an answer, a refusal, or an error that names whom was waited for.

Nothing is queued for a process that is not there: a call waits, inside its deadline, until there is a connection, and after the
death of a process the next call reaches the process that listens on its address then. When a connection breaks, the calls that
wait on it end at once.
"""

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from shoal.comm.wire.addresses import Address
from shoal.comm.wire.buffers import Payload, copy_politely, describe
from shoal.comm.wire.errors import Dropped, Refused, WireClosed, WireLost, WireTimeout
from shoal.comm.wire.message import REFUSED, TAKEN, Envelope, Header, is_chunk, unpack, unpack_chunk
from shoal.comm.wire.payloads import Streams
from shoal.comm.wire.sockets import AsyncSocket

if TYPE_CHECKING:
    from shoal.comm.wire.node import Node, Outgoing

_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED
_EVENTS = zmq.EVENT_DISCONNECTED | _HANDSHAKES
_HUNG_UP_TIMES = 3
"""Handshakes in a row that the other side ended without a word, after which the keys are to blame and not its death."""
_NOT_DONE = frozenset({"place", "incomplete", "busy"})
"""Refusals that say nothing about the request: another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was answered."""

    header: Header
    body: Any
    """The struct of the operation's answer type."""
    payload: memoryview | None
    """The payload's bytes: those of ``into`` if that was given, else memory that stays as it is while anything refers to it."""

    @property
    def epoch(self) -> int:
        """The epoch of the one who answered."""
        return self.header.epoch


@dataclass(kw_only=True)
class _Call:
    """An attempt that waits."""

    operation: str
    into: memoryview | None
    dtype: str = ""
    """Of ``into``."""
    is_sent: bool = False
    is_answering: bool = False
    """True once an answer was announced: the payload is on its way."""
    future: "asyncio.Future[tuple[Envelope, Any, memoryview | None]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def forget(self) -> None:
        """The call has ended, perhaps without looking at what came: asyncio would complain of an error that nobody saw."""
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()


class Peer:
    """A DEALER socket, connected when the first call is made."""

    def __init__(self, node: "Node", address: str, parsed: Address, *, shares: bool) -> None:
        self.address = address
        self.is_closed = False
        self._node = node
        self._parsed = parsed
        self._shares = shares
        self._socket: zmq.Socket[bytes] | None = None
        self._async_socket: AsyncSocket | None = None
        self._monitor: AsyncSocket | None = None
        self._streams = Streams()
        self._calls: dict[int, _Call] = {}
        self._folder = ""
        self._is_key_refused = False
        self._num_hung_up = 0

    async def call(
        self,
        body: msgspec.Struct,
        *,
        key: str = "",
        payload: Payload | None = None,
        deadline: float,
        attempts: int = 1,
        into: Payload | None = None,
    ) -> Answer:
        """Ask, and wait for the answer.

        Args:
            body: the request's struct; its type says the operation.
            key: what it is about, in the operation's words.
            payload: a torch tensor, a numpy array or bytes, contiguous; not to be changed before the call ends.
            deadline: seconds for everything, shared evenly by the attempts.
            attempts: how often it is sent at most, each time under a new sequence number: the operation must not mind being done
                twice. When the connection breaks, the next attempt begins at once.
            into: memory of just the length and type of the answer's payload, which is then put there; undefined when the call
                fails. An answer without a payload leaves it as it is.

        Raises:
            WireTimeout: nobody answered in time (``WireLost``: the connection broke, ``WireClosed``: this side closed).
            Refused: the answer is no.
        """
        assert attempts >= 1 and deadline > 0
        loop = asyncio.get_running_loop()
        target, dtype = (None, "") if into is None else describe(into)[:2]
        assert target is None or not target.readonly
        end = loop.time() + deadline
        attempt = 1
        while True:
            seconds = max(0.0, end - loop.time()) / (attempts - attempt + 1)
            try:
                return await self._attempt(body, key=key, payload=payload, seconds=seconds, into=target, dtype=dtype)
            except WireClosed:
                raise
            except WireTimeout as error:
                if attempt == attempts:
                    raise self._explain(error, attempts, deadline) from error
            except Refused as refusal:
                if refusal.code not in _NOT_DONE or attempt == attempts:
                    raise
            attempt += 1

    @property
    def is_key_refused(self) -> bool:
        """True once the other side has said that it does not know this process's key."""
        return self._is_key_refused

    @property
    def is_key_wrong(self) -> bool:
        """True when the other side hangs up in every handshake: it has another key than the one that it is called by here."""
        return self._num_hung_up >= _HUNG_UP_TIMES

    async def close(self) -> None:
        """End the connection; calls that wait end with ``WireClosed`` at once. Each of those who use it may do so."""
        if self.is_closed:
            return
        self.is_closed = True
        for call in self._calls.values():
            call.fail(self._closed(call.operation))
        self._streams.close_all()
        if self._socket is not None and self._async_socket is not None and self._monitor is not None:
            # First of all: where nobody reads what happens to a socket that is still watched, and something does (the other side
            # dies at this moment), the one thread that does all of ZeroMQ's work waits for a reader for ever (libzmq 3575).
            self._socket.disable_monitor()
            self._monitor.close()
            self._async_socket.close()
        self._node.forget_peer(self)

    async def _attempt(
        self,
        body: msgspec.Struct,
        *,
        key: str,
        payload: Payload | None,
        seconds: float,
        into: memoryview | None,
        dtype: str,
    ) -> Answer:
        operation = self._node.operations.name_of(body)
        if self.is_closed:
            raise self._closed(operation)
        async_socket = self._open()
        call = _Call(operation=operation, into=into, dtype=dtype)
        outgoing = None
        is_done = False
        try:
            async with asyncio.timeout(seconds):
                folder = self._folder if self._shares else ""
                outgoing = await self._node.compose(
                    operation, body, payload, key=key, deadline=seconds, receiver=self, folder=folder
                )
                self._calls[outgoing.sequence] = call
                answer = await self._exchange(async_socket, call, outgoing)
                is_done = True
                return answer
        except TimeoutError as error:
            text = f"{self.address} did not answer {operation} within {seconds:.3g} s"
            raise WireTimeout(text, address=self.address, operation=operation) from error
        except zmq.ZMQError as error:
            raise self._closed(operation) from error
        except Dropped as drop:
            # It would be dropped there.
            epoch = self._node.epoch
            raise Refused(drop.reason, drop.text, epoch=epoch, address=self.address, operation=operation) from drop
        finally:
            call.forget()
            if outgoing is not None:
                self._end(outgoing, is_done=is_done)

    async def _exchange(self, async_socket: AsyncSocket, call: _Call, outgoing: "Outgoing") -> Answer:
        await async_socket.send(outgoing.frames)
        call.is_sent = True
        # Beside it, because a refusal may come, or the connection break, before the whole payload is sent.
        sending = self._node.spawn(self._send_payload(async_socket, outgoing))
        try:
            envelope, body, payload = await call.future
        finally:
            sending.cancel()
        if payload is not None and call.into is not None and envelope.header.place is not None:
            await copy_politely(payload, call.into)
            payload = call.into
        return Answer(header=envelope.header, body=body, payload=payload)

    async def _send_payload(self, async_socket: AsyncSocket, outgoing: "Outgoing") -> None:
        # Closed: the call was told so.
        with contextlib.suppress(zmq.ZMQError):
            await self._node.send_chunks(async_socket, outgoing, is_copied=self._parsed.kind == "inproc")

    def _end(self, outgoing: "Outgoing", *, is_done: bool) -> None:
        del self._calls[outgoing.sequence]
        if not is_done:
            self._node.payloads.abandon(outgoing.sequence)

    def _closed(self, operation: str) -> WireClosed:
        text = f"{operation} to {self.address} was given up: this process closed the connection"
        return WireClosed(text, address=self.address, operation=operation)

    def _lost(self, operation: str) -> WireLost:
        text = f"the connection to {self.address} broke while {operation} waited for its answer"
        return WireLost(text, address=self.address, operation=operation)

    def _explain(self, error: WireTimeout, attempts: int, deadline: float) -> WireTimeout:
        why = ""
        if self._is_key_refused:
            why = "; it refused this process's key"
        elif self.is_key_wrong:
            why = "; it has another key than the one that it is called by here"
        if attempts > 1:
            why += f" ({attempts} attempts in {deadline:.3g} s)"
        return type(error)(f"{error}{why}", address=error.address, operation=error.operation)

    def _open(self) -> AsyncSocket:
        if self._async_socket is None:
            socket = self._node.open_dealer(self._parsed)
            # Not pyzmq's own name, the descriptor: that is used again while the socket before is still being closed.
            name = f"inproc://monitor-{secrets.token_hex(8)}"
            try:
                self._monitor = AsyncSocket(socket.get_monitor_socket(_EVENTS, addr=name), self._watch)
                socket.connect(self._parsed.endpoint)
            except zmq.ZMQError:
                # One that stays open would keep the context, and with it the process, from ending.
                socket.close(linger=0)
                raise
            self._socket, self._async_socket = socket, AsyncSocket(socket, self._receive)
        return self._async_socket

    def _watch(self, frames: list[zmq.Frame]) -> None:
        event = parse_monitor_message([frame.bytes for frame in frames])["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._is_key_refused = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._num_hung_up += 1
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_hung_up = 0
        if event != zmq.EVENT_DISCONNECTED:
            return
        # The next process that listens there may see another folder of arenas, or none.
        self._folder = ""
        self._streams.close_all()
        for call in self._calls.values():
            if call.is_sent:
                call.fail(self._lost(call.operation))

    def _receive(self, frames: list[zmq.Frame]) -> None:
        """Take one message that arrived. Nothing that it holds can make this fail."""
        counters = self._node.counters
        counters.add("received")
        parts = [frame.buffer for frame in frames]
        try:
            if is_chunk(parts):
                self._streams.feed(None, unpack_chunk(parts))
                counters.add("accepted")
            else:
                self._admit(unpack(parts))
        except Dropped as drop:
            counters.add(drop.reason)

    def _admit(self, envelope: Envelope) -> None:
        node, header = self._node, envelope.header
        if header.operation == TAKEN:
            node.take_note(header, self)
            node.counters.add("accepted")
            return
        call = self._calls.get(header.answers)
        if call is None or call.future.done() or call.is_answering:
            is_old = 0 <= header.answers < node.num_sent
            raise Dropped("late" if is_old else "unknown", f"answers {header.answers}, which nobody waits for")
        if header.operation == REFUSED:
            refusal = node.operations.decode_refusal(envelope.body)
            node.counters.add("accepted")
            call.fail(
                Refused(refusal.code, refusal.text, epoch=header.epoch, address=self.address, operation=call.operation)
            )
            if refusal.code == "place":
                self._folder = ""
            return
        self._answer(call, envelope)

    def _answer(self, call: _Call, envelope: Envelope) -> None:
        node, header = self._node, envelope.header
        if header.operation != call.operation:
            raise Dropped("unknown", f"answers {call.operation} with {header.operation}")
        node.operations[call.operation].check_sizes(envelope)
        # A payload of no bytes too: what lies in the buffer would pass for it.
        if call.into is not None and header.has_payload:
            due, found = (call.into.nbytes, call.dtype), (envelope.num_bytes, header.dtype)
            if due != found:
                raise Dropped("payload", f"{found[0]} bytes of {found[1]} for a buffer of {due[0]} of {due[1]}")
        body = node.operations.decode_answer(call.operation, envelope.body)
        if header.place is not None:
            self._deliver(call, envelope, body, node.payloads.view(envelope, partial(self._return, header)))
        elif not envelope.is_stream:
            self._deliver(call, envelope, body, node.payloads.inline(envelope, call.into))
        else:
            target = node.payloads.room(envelope) if call.into is None else call.into
            call.is_answering = True
            finish, fail = partial(self._deliver, call, envelope, body, target), partial(self._give_up, call)
            self._streams.open(None, header.sequence, target, finish=finish, fail=fail)
            # When the call ends first, nothing more is written to its memory.
            call.future.add_done_callback(lambda _: self._streams.close(None, header.sequence))

    def _deliver(self, call: _Call, envelope: Envelope, body: Any, payload: memoryview | None) -> None:
        self._node.counters.add("accepted")
        self._folder = envelope.header.folder
        if not call.future.done():
            call.future.set_result((envelope, body, payload))

    def _give_up(self, call: _Call, reason: str) -> None:
        """The payload of an answer will not become whole."""
        self._node.counters.add(reason)
        call.fail(self._lost(call.operation))

    def _return(self, header: Header) -> None:
        """Nobody refers to the payload of an answer any more."""
        if self._async_socket is not None:
            self._node.send_taken(self._async_socket, header)
