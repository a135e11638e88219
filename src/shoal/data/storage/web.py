"""Files of a web server: ``http://`` and ``https://``, read only, by ranges where the server has them."""

import base64
import hashlib
import re
from collections.abc import Iterator
from urllib.parse import quote

from shoal.core.errors import RequestError
from shoal.data.storage.attempts import Attempts, Part, Transient
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.connections import Answer, Connections
from shoal.data.storage.protocol import Entry, NoListing, Unreachable, check_path, join, missing

_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)", re.ASCII)


class WebStorage:
    """What a server has under one address."""

    def __init__(self, address: str, settings: StorageConfig) -> None:
        self._address = address.rstrip("/")
        self._attempts = Attempts(self._address, settings)
        self._connections = Connections(settings.timeout)
        self.calls = self._attempts.calls

    @property
    def address(self) -> str:
        """The server."""
        return self._address

    def stat(self, path: str) -> Entry:
        """Size and version of a file."""

        def ask() -> Entry:
            answer = self._connections.ask("HEAD", self._url(path), {"Accept-Encoding": "identity"})
            answer.text()
            if answer.status in (405, 501):
                return self._stat_by_read(path)
            self._check(answer, path)
            length = answer.headers["Content-Length"]
            if length is None or not length.isdigit():
                return self._stat_by_read(path)
            return Entry(path=path, size=int(length), version=_version(answer))

        return self._attempts.run("asking for the size", path, ask)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly these bytes."""
        url = self._url(path)
        if end is not None and end <= start:
            self.stat(path)
            return b""
        return self._attempts.read(path, start, end, lambda at, until: self._part(url, path, at, until))

    def list(self, folder: str) -> Iterator[Entry]:
        """A web server does not list.

        Raises:
            NoListing: always.
        """
        raise NoListing(
            f"{join(self._address, folder)}: a web server has no listing; name one file, or a store that shoal data build made",
            address=self._address,
            path=folder,
        )

    def create(self, path: str, content: bytes) -> None:
        """A web server is only read.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"{join(self._address, path)}: data is only read over http; write to a folder or to an object store"
        )

    def replace(self, path: str, content: bytes) -> None:
        """A web server is only read.

        Raises:
            RequestError: always.
        """
        self.create(path, content)

    def delete(self, path: str) -> None:
        """A web server is only read.

        Raises:
            RequestError: always.
        """
        self.create(path, b"")

    def _part(self, url: str, path: str, start: int, end: int | None) -> Part:
        headers = {"Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        answer = self._connections.ask("GET", url, headers)
        if answer.status == 416:
            answer.text()
            found = _RANGE.fullmatch(answer.headers["Content-Range"] or "")
            return Part(size=int(found[3]) if found else 0, version=_version(answer), chunks=iter(()))
        self._check(answer, path)
        if answer.status == 206:
            found = _RANGE.fullmatch(answer.headers["Content-Range"] or "")
            if found is None or found[1] is None or int(found[1]) != start:
                raise Transient(
                    f"asked for bytes from {start} on, and the server sent {answer.headers['Content-Range']}"
                )
            return Part(size=int(found[3]), version=_version(answer), chunks=answer.chunks)
        length = answer.headers["Content-Length"]
        if length is None or not length.isdigit():
            raise Transient("the server says no length, so an answer cut short could not be told from a whole one")
        chunks = _checked(answer) if not start else _skip(answer.chunks, start)
        return Part(size=int(length), version=_version(answer), chunks=chunks)

    def _stat_by_read(self, path: str) -> Entry:
        part = self._part(self._url(path), path, 0, 1)
        for _ in part.chunks:
            pass
        return Entry(path=path, size=part.size, version=part.version)

    def _check(self, answer: Answer, path: str) -> None:
        if answer.status in (404, 410):
            answer.text()
            raise missing(self._address, path)
        if answer.status not in (200, 206):
            answer.text()
            raise Unreachable(
                f"{join(self._address, path)}: the server answered {answer.status}", address=self._address, path=path
            )

    def _url(self, path: str) -> str:
        name, question, query = check_path(self._address, path).partition("?")
        return f"{self._address}/{quote(name, safe='/%:@')}{question}{query}"


def _version(answer: Answer) -> str:
    return str(answer.headers["ETag"] or answer.headers["Last-Modified"] or "")


def _skip(chunks: Iterator[bytes], count: int) -> Iterator[bytes]:
    """The bytes behind the first ``count``, of a server that knows no ranges."""
    for chunk in chunks:
        if count < len(chunk):
            yield chunk[count:]
        count = max(0, count - len(chunk))


def _checked(answer: Answer) -> Iterator[bytes]:
    """A whole file, held to the sum that the server sent with it, where it did."""
    expected = answer.headers["Content-MD5"]
    found = hashlib.md5(usedforsecurity=False)
    held = b""
    for chunk in answer.chunks:
        found.update(chunk)
        # The last chunk is handed on when the sum agrees, so a file that does not is not complete.
        if held:
            yield held
        held = chunk
    if expected and base64.b64encode(found.digest()).decode() != expected.strip():
        raise Transient(f"the file has MD5 {base64.b64encode(found.digest()).decode()}, the server says {expected}")
    if held:
        yield held
