"""As much of HTTP/1.1 as a small server needs, with a limit on everything that a stranger decides.

The standard library's server takes a thread for each connection and waits for a slow one for ever; here a connection that says
nothing costs a few kilobytes until its time is up, and gives way to a new one where there are too many.
"""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

_HEAD_BYTES = 16 * 1024
_ENDS = b"\r\n\r\n"
_MOST_FIELDS = 64
_WORTH_PACKING = 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a client may cost."""

    body_bytes: int = 1 << 20
    head_seconds: float = 10.0
    """From one answer to the end of the next request's head."""
    body_seconds: float = 10.0
    write_seconds: float = 10.0
    connections: int = 256


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request whose lengths were checked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    query: Mapping[str, str] = field(default_factory=dict)
    """What follows the question mark; of a name that is there twice, the last."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer: JSON, bytes of another type, or one that goes on until either side ends it."""

    status: int
    content: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """In the place of ``content``."""
    content_type: str = "application/json"
    chunks: AsyncIterator[bytes] | None = None
    """In the place of both: sent as they come, and the connection ends after them."""


class HttpError(Exception):
    """An answer that ends a connection."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """Hands requests to ``answer``, one after the other on each connection.

    Args:
        answer: what a request gets.
        limits: on clients.
    """

    def __init__(self, answer: Callable[[Request], Awaitable[Response]], limits: Limits) -> None:
        self._answer, self._limits = answer, limits
        self._idle: dict[asyncio.Task[None], None] = {}
        """Connections that have asked nothing, the longest idle first."""
        self._all: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_closing = False
        self.evicted = 0
        """Idle connections that gave way to new ones."""

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Begin to listen; the address."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_HEAD_BYTES, backlog=512)
        found = self._server.sockets[0].getsockname()
        return str(found[0]), int(found[1])

    async def drain(self, seconds: float) -> None:
        """Take no more connections, and let requests that have begun have their answers."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for task in list(self._idle):
            task.cancel()
        if self._all:
            await asyncio.wait(self._all, timeout=seconds)
        for task in self._all:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection has a task of its own"
        self._all.add(task)
        try:
            if len(self._all) > self._limits.connections and not self._make_room():
                await self._send(writer, Response(status=503, content={"error": "too many connections"}), close=True)
                return
            await self._talk(reader, writer, task)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, TimeoutError):
            pass  # It went away, or was told to.
        finally:
            self._idle.pop(task, None)
            self._all.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    def _make_room(self) -> bool:
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        oldest.cancel()
        self.evicted += 1
        return True

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: "asyncio.Task[None]"
    ) -> None:
        while not self._is_closing:
            self._idle[task] = None
            try:
                request = await self._read(reader, writer, task)
                if request is None:
                    return
                response = await self._answer(request)
                if response.chunks is not None:
                    await self._stream(reader, writer, response, response.chunks)
                    return
                close = self._is_closing or request.headers.get("connection", "").lower() == "close"
            except HttpError as error:
                await self._send(writer, Response(status=error.status, content={"error": str(error)}), close=True)
                await _linger(reader)
                return
            await self._send(writer, response, close=close, packs=accepts_gzip(request.headers))
            if close:
                return

    async def _stream(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        response: Response,
        chunks: AsyncIterator[bytes],
    ) -> None:
        """Send an answer of any length. One that nobody hears any more, or too slowly, ends."""
        writer.write(_head(response, ["connection: close"]))
        # Nothing more is asked on this connection: whatever is read is its end.
        waiting: set[asyncio.Future[Any]] = {asyncio.ensure_future(reader.read(1))}
        (gone,) = waiting
        try:
            while True:
                following = asyncio.ensure_future(anext(chunks, None))
                waiting.add(following)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() or (chunk := following.result()) is None:
                    return
                waiting.discard(following)
                writer.write(chunk)
                async with asyncio.timeout(self._limits.write_seconds):
                    await writer.drain()
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: "asyncio.Task[None]"
    ) -> Request | None:
        """The next request; None where the client is done."""
        try:
            async with asyncio.timeout(self._limits.head_seconds):
                head = await reader.readuntil(_ENDS)
        except asyncio.LimitOverrunError:
            raise HttpError(431, f"the head of the request has more than {_HEAD_BYTES} bytes") from None
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise HttpError(400, "the request ends in its head") from None
            return None
        except TimeoutError:
            raise HttpError(408, f"no whole head of a request came in {self._limits.head_seconds:g} s") from None
        self._idle.pop(task, None)
        method, path, query, headers = parse_head(head)
        length = body_length(headers, self._limits.body_bytes)
        if headers.get("expect", "").lower() == "100-continue" and length:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await reader.readexactly(length)
        except TimeoutError:
            raise HttpError(408, f"the body did not come in {self._limits.body_seconds:g} s") from None
        return Request(method=method, path=path, headers=headers, body=body, query=parse_query(query))

    async def _send(
        self, writer: asyncio.StreamWriter, response: Response, *, close: bool, packs: bool = False
    ) -> None:
        body = response.body
        if body is None:
            body = (json.dumps(response.content, allow_nan=False) + "\n").encode()
        lines = [f"connection: {'close' if close else 'keep-alive'}"]
        if packs and len(body) >= _WORTH_PACKING:
            body = gzip.compress(body, 1, mtime=0)
            lines.append("content-encoding: gzip")
        writer.write(_head(response, [f"content-length: {len(body)}", *lines]) + body)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(self._limits.write_seconds):
                await writer.drain()


def _head(response: Response, more: list[str]) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
        f"content-type: {response.content_type}",
        *more,
        *(f"{name}: {value}" for name, value in response.headers.items()),
    ]
    return "\r\n".join(lines).encode() + _ENDS


async def _linger(reader: asyncio.StreamReader) -> None:
    """Read for a moment what a refused client still sends: closed at once, its connection would be reset before it reads why."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            for _ in range(256):
                if not await reader.read(65536):
                    return


class Head(NamedTuple):
    """What a request begins with."""

    method: str
    path: str
    query: str
    """What follows the question mark, as it came."""
    headers: dict[str, str]
    """Their names are in small letters."""


def parse_head(head: bytes) -> Head:
    """The head of a request, taken apart.

    Raises:
        HttpError: it is no head of HTTP/1.
    """
    try:
        first, *lines = head.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
        method, path, protocol = first.split(" ")
    except ValueError:
        raise HttpError(400, "the request does not begin as one of HTTP/1.1 does") from None
    if protocol not in ("HTTP/1.1", "HTTP/1.0") or not method.isalpha() or not path.startswith("/"):
        raise HttpError(400, "the request does not begin as one of HTTP/1.1 does")
    headers: dict[str, str] = {"connection": "close"} if protocol == "HTTP/1.0" else {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HttpError(400, "a header of the request is no header")
        if name.lower() == "content-length" and "content-length" in headers:
            raise HttpError(400, "the request says its length twice")
        headers[name.lower()] = value.strip()
    bare, _, query = path.partition("?")
    return Head(method, bare, query, headers)


def parse_query(text: str) -> dict[str, str]:
    """The fields of a query.

    Raises:
        HttpError: there are too many, or they are no text.
    """
    try:
        return dict(parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise HttpError(400, f"the query is no list of at most {_MOST_FIELDS} fields") from None


def accepts_gzip(headers: Mapping[str, str]) -> bool:
    """True for a client that says that it can unpack."""
    kinds = [kind.replace(" ", "").lower() for kind in headers.get("accept-encoding", "").split(",")]
    return any(kind == "gzip" or (kind.startswith("gzip;q=") and kind[7:] not in ("0", "0.0")) for kind in kinds)


def body_length(headers: Mapping[str, str], most: int) -> int:
    """Bytes of the body that follows.

    Raises:
        HttpError: it is not said, or more than ``most``.
    """
    if "transfer-encoding" in headers:
        raise HttpError(501, "bodies in chunks are not read; say content-length")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise HttpError(400, "content-length is no number of bytes")
    if int(text) > most:
        raise HttpError(413, f"the body has {int(text)} bytes, and {most} are allowed")
    return int(text)
