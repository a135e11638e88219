"""HTTP requests over connections that are kept: one for each thread and server, by ``http.client``."""

import http.client
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from shoal.data.storage.attempts import Transient

_CHUNK = 1 << 18
_MOST_REDIRECTS = 5
_MOST_TEXT = 1 << 26
_LATER = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Status and headers; the body is read from ``chunks``."""

    status: int
    headers: http.client.HTTPMessage
    url: str
    chunks: Iterator[bytes]

    def text(self) -> bytes:
        """The whole body, which is small."""
        content = bytearray()
        for chunk in self.chunks:
            content += chunk
            if len(content) > _MOST_TEXT:
                raise Transient(f"the answer has more than {_MOST_TEXT} bytes")
        return bytes(content)


class _Kept:
    """The connections of one thread, closed when the thread or the storage goes."""

    def __init__(self) -> None:
        self.connections: dict[tuple[str, str], http.client.HTTPConnection] = {}
        self.unread: dict[tuple[str, str], http.client.HTTPResponse] = {}

    def drop(self, where: tuple[str, str]) -> None:
        """Close a connection, and the answer that is read from it."""
        response = self.unread.pop(where, None)
        if response is not None:
            response.close()
        connection = self.connections.pop(where, None)
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        for where in list(self.connections):
            self.drop(where)


class Connections:
    """Connections of one storage. Threads do not share any."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._mine = threading.local()

    def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        follow: bool = True,
    ) -> Answer:
        """Make a request.

        Raises:
            Transient: no answer, or one that says to come again.
        """
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._ask_once(method, url, headers or {}, body)
            if answer.status in (301, 302, 303, 307, 308) and follow and answer.headers["Location"]:
                answer.text()
                url = urljoin(url, answer.headers["Location"])
                continue
            if answer.status in _LATER:
                answer.text()
                raise Transient(f"the server answered {answer.status}")
            return answer
        raise Transient(f"more than {_MOST_REDIRECTS} redirections")

    def _ask_once(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        parts = urlsplit(url)
        where = (parts.scheme, parts.netloc)
        target = parts.path or "/"
        if parts.query:
            target += f"?{parts.query}"
        kept = self._kept()
        if where in kept.unread:
            # Somebody has left an answer half read; what comes next on this connection is the rest of it.
            kept.drop(where)
        was_open = where in kept.connections
        if not was_open:
            kind = http.client.HTTPSConnection if where[0] == "https" else http.client.HTTPConnection
            kept.connections[where] = kind(where[1], timeout=self._timeout)
        connection = kept.connections[where]
        try:
            connection.request(method, target, body=body, headers=dict(headers))
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            kept.drop(where)
            if was_open and method in ("GET", "HEAD") and isinstance(error, ConnectionError):
                # The server had closed the connection while nobody used it.
                return self._ask_once(method, url, headers, body)
            raise Transient(f"{method} {where[1]}: {error or type(error).__name__}") from error
        kept.unread[where] = response
        return Answer(status=response.status, headers=response.headers, url=url, chunks=_chunks(kept, where, response))

    def _kept(self) -> _Kept:
        if not hasattr(self._mine, "kept"):
            self._mine.kept = _Kept()
        found: _Kept = self._mine.kept
        return found


def _chunks(kept: _Kept, where: tuple[str, str], response: http.client.HTTPResponse) -> Iterator[bytes]:
    is_whole = False
    try:
        while chunk := _next_chunk(response):
            yield chunk
        # http.client takes a connection that was closed in the middle of a body for its end.
        is_whole = not response.length
    except (OSError, http.client.HTTPException) as error:
        raise Transient(f"the answer of {where[1]} broke off: {error or type(error).__name__}") from error
    finally:
        if kept.unread.get(where) is response:
            if is_whole and not response.will_close:
                del kept.unread[where]
            else:
                kept.drop(where)
        response.close()


def _next_chunk(response: http.client.HTTPResponse) -> bytes:
    if response.length is None:
        return response.read1(_CHUNK)
    return response.read(min(_CHUNK, response.length)) if response.length else b""
