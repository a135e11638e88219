"""HDFS over HTTP: ``webhdfs://host:port``, for clusters whose data nodes speak nothing else to the outside. Slower than ``hdfs://``."""

import getpass
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from shoal.data.storage.attempts import Attempts, Part, Transient
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.connections import Answer, Connections
from shoal.data.storage.protocol import (
    Entry,
    Missing,
    Unreachable,
    already_there,
    check_path,
    join,
    missing,
)

_BESIDE = ".shoal-writing-"


class WebHdfsStorage:
    """One name node's files, over its web interface."""

    def __init__(self, address: str, settings: StorageConfig) -> None:
        self._address = address.rstrip("/")
        self._attempts = Attempts(self._address, settings)
        self.calls = self._attempts.calls
        self._connections = Connections(settings.timeout)
        scheme = "https" if self._address.startswith("swebhdfs://") else "http"
        self._url = f"{scheme}://{self._address.partition('://')[2]}/webhdfs/v1"
        self._user = settings.options.get("user") or getpass.getuser()

    @property
    def address(self) -> str:
        """The name node."""
        return self._address

    def stat(self, path: str) -> Entry:
        """Size and version of a file."""
        found = self._ask("asking for the size", "GET", path, "GETFILESTATUS")["FileStatus"]
        if found["type"] != "FILE":
            raise missing(self._address, path)
        return _entry(path, found)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly these bytes."""
        found = self.stat(path)

        def part(at: int, until: int | None) -> Part:
            stop = found.size if until is None else min(until, found.size)
            if at >= stop:
                return Part(size=found.size, version="", chunks=iter(()))
            url = self._request_url(check_path(self._address, path), "OPEN", offset=str(at), length=str(stop - at))
            answer = self._connections.ask("GET", url)
            self._check(answer, path)
            return Part(size=found.size, version="", chunks=answer.chunks)

        return self._attempts.read(path, start, end, part)

    def list(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, sorted by path."""
        found: list[Entry] = []
        folders = [folder.strip("/")]
        while folders:
            inside = folders.pop()
            try:
                answer = self._ask("listing", "GET", inside, "LISTSTATUS", is_folder=True)
            except Missing:
                continue
            for each in answer["FileStatuses"]["FileStatus"]:
                path = "/".join(part for part in (inside, each["pathSuffix"]) if part)
                if each["type"] == "DIRECTORY":
                    folders.append(path)
                elif not each["pathSuffix"].startswith(_BESIDE):
                    found.append(_entry(path, each))
        yield from sorted(found, key=lambda entry: entry.path)

    def create(self, path: str, content: bytes) -> None:
        """Write a file that is not there yet."""
        beside = self._write_beside(path, content)
        target = f"/{path}"

        def rename() -> bool:
            answer = self._connections.ask("PUT", self._request_url(beside, "RENAME", destination=target))
            text = answer.text()
            if answer.status == 404:
                # A rename whose answer was lost has happened: nobody else knows the name beside.
                return True
            return answer.status == 200 and bool(json.loads(text)["boolean"])

        if not self._attempts.run("renaming", path, rename):
            self.delete(beside)
            raise already_there(self._address, path)

    def replace(self, path: str, content: bytes) -> None:
        """Write a file, over the one that is there."""
        beside = self._write_beside(path, content)
        options: dict[str, str] = {"destination": f"/{path}", "renameoptions": "OVERWRITE"}
        self._ask("renaming", "PUT", beside, "RENAME", options=options)

    def delete(self, path: str) -> None:
        """Delete a file; nothing happens where there is none."""
        self._ask("deleting", "DELETE", path, "DELETE", options={"recursive": "false"})

    def _write_beside(self, path: str, content: bytes) -> str:
        folder, slash, _ = check_path(self._address, path).rpartition("/")

        def write() -> str:
            beside = f"{folder}{slash}{_BESIDE}{secrets.token_hex(8)}"
            asked = self._connections.ask("PUT", self._request_url(beside, "CREATE", overwrite="false"), follow=False)
            asked.text()
            where = asked.headers["Location"]
            if asked.status != 307 or not where:
                raise Transient(f"the name node answered {asked.status} and named no data node")
            written = self._connections.ask("PUT", where, {"Content-Type": "application/octet-stream"}, content)
            text = written.text()
            if written.status != 201:
                raise Transient(f"the data node answered {written.status}: {text[:300]!r}")
            return beside

        return self._attempts.run("writing", path, write)

    def _ask(
        self,
        what: str,
        method: str,
        path: str,
        operation: str,
        *,
        is_folder: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> Any:
        if not is_folder:
            check_path(self._address, path)

        def ask() -> Any:
            answer = self._connections.ask(method, self._request_url(path, operation, **(options or {})))
            self._check(answer, path)
            text = answer.text()
            try:
                return json.loads(text) if text else {}
            except ValueError as error:
                raise Transient(f"the answer is not JSON: {text[:200]!r}") from error

        return self._attempts.run(what, path, ask)

    def _check(self, answer: Answer, path: str) -> None:
        if answer.status == 404:
            answer.text()
            raise missing(self._address, path)
        if answer.status not in (200, 201):
            said = answer.text()[:300].decode(errors="replace")
            raise Unreachable(
                f"{join(self._address, path)}: the name node answered {answer.status}: {said}",
                address=self._address,
                path=path,
            )

    def _request_url(self, path: str, operation: str, **options: str) -> str:
        query = urlencode({"op": operation, "user.name": self._user, **options})
        return f"{self._url}/{quote(path, safe='/')}?{query}"


def _entry(path: str, found: Any) -> Entry:
    return Entry(path=path, size=int(found["length"]), version=f"{found['modificationTime']}-{found['length']}")
