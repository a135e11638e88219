"""HDFS by ``hdfs-native``, which speaks to name and data nodes itself and checks their checksums: no Java, no libhdfs.

A file is written beside its place and renamed, because HDFS shows a file while it is being written; a rename that must not
replace is what makes a create exclusive.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shoal.core.errors import RequestError
from shoal.data.storage.attempts import Attempts, Part, Transient
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.protocol import (
    AlreadyThere,
    Entry,
    WrongBytes,
    already_there,
    check_path,
    join,
    missing,
    truncated,
)
from shoal.data.storage.timebox import within

Result = TypeVar("Result")
_PIECE = 8 << 20
"""Bytes of one request: a read that breaks off goes on at the last of them."""
_OPEN_SECONDS = 5.0
"""For which a file that was opened for a read serves the next one."""
_MOST_OPEN = 64
_BESIDE = ".shoal-writing-"


@dataclass(frozen=True, kw_only=True)
class _Opened:
    entry: Entry
    reader: Any
    until: float


class HdfsStorage:
    """One name node's files."""

    def __init__(self, address: str, settings: StorageConfig) -> None:
        """``address``: ``hdfs://host:port``.

        Raises:
            RequestError: ``hdfs-native`` is not installed, or refuses the address.
        """
        try:
            import hdfs_native
        except ImportError:
            raise RequestError(f"{address} needs hdfs-native: pip install 'shoal[hdfs]'") from None
        self._address = address.rstrip("/")
        self._settings = settings
        self._attempts = Attempts(self._address, settings)
        self.calls = self._attempts.calls
        self._open: dict[str, _Opened] = {}
        self._options: Any = hdfs_native.WriteOptions
        try:
            self._client: Any = hdfs_native.Client(self._address, dict(settings.options))
        except Exception as error:
            raise RequestError(f"{self._address}: hdfs-native refuses it: {error}") from error

    @property
    def address(self) -> str:
        """The name node."""
        return self._address

    def stat(self, path: str) -> Entry:
        """Size and version of a file."""
        full = self._full(path)
        found = self._run("asking for the size", path, lambda: self._client.get_file_info(full))
        if found.isdir:
            raise missing(self._address, path)
        return _entry(path, found)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly these bytes, held to the checksums of HDFS."""
        full = self._full(path)
        opened = self._opened(path, full)
        found = opened.entry
        until = found.size if end is None else end
        if until > found.size or start > found.size:
            raise truncated(self._address, path, max(start, until), found.size)
        if until <= start:
            return b""
        first = [opened.reader]

        def ask(at: int, stop: int | None) -> Part:
            # Open again where a read broke off: another copy of the block may answer, or it is another file by now.
            if not first:
                self._open.pop(path, None)
            again = first.pop() if first else self._once(path, lambda: self._client.read(full))
            return Part(size=found.size, version=found.version, chunks=self._pieces(path, again, at, stop or until))

        return self._attempts.read(path, start, until, ask)

    def _opened(self, path: str, full: str) -> "_Opened":
        """A file with its size and the places of its blocks, which the name node is asked for once in a scan and not for each
        piece; for a moment, because another may take its name."""
        known = self._open.get(path)
        if known is not None and time.monotonic() < known.until:
            return known
        entry = self.stat(path)
        reader = self._run("opening", path, lambda: self._client.read(full))
        made = _Opened(entry=entry, reader=reader, until=time.monotonic() + _OPEN_SECONDS)
        self._open[path] = made
        while len(self._open) > _MOST_OPEN:
            self._open.pop(next(iter(self._open)), None)
        return made

    def list(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, sorted by path."""
        top = f"/{folder.strip('/')}"
        try:
            found = self._run("listing", folder, lambda: list(self._client.list_status(top, True)))
        except FileNotFoundError:
            return
        except RequestError:
            return
        entries = [_entry(each.path.lstrip("/"), each) for each in found if not each.isdir]
        for entry in sorted(entries, key=lambda each: each.path):
            if not entry.path.rpartition("/")[2].startswith(_BESIDE):
                yield entry

    def create(self, path: str, content: bytes) -> None:
        """Write a file that is not there yet."""
        beside = self._write_beside(path, content)
        try:
            self._rename(beside, path, is_new=True)
        except AlreadyThere:
            self._drop(beside)
            raise

    def replace(self, path: str, content: bytes) -> None:
        """Write a file, over the one that is there."""
        self._rename(self._write_beside(path, content), path, is_new=False)

    def delete(self, path: str) -> None:
        """Delete a file; nothing happens where there is none."""
        full = self._full(path)
        self._open.pop(path, None)
        with suppress(FileNotFoundError, RequestError):
            self._run("deleting", path, lambda: self._client.delete(full, False))

    def _pieces(self, path: str, reader: Any, start: int, end: int) -> Iterator[bytes]:
        for at in range(start, end, _PIECE):
            size = min(_PIECE, end - at)
            yield self._once(path, partial(_read_range, reader, at, size))

    def _write_beside(self, path: str, content: bytes) -> str:
        folder, slash, _ = self._full(path).rpartition("/")

        def write() -> str:
            beside = f"{folder}{slash}{_BESIDE}{secrets.token_hex(8)}"
            options = self._options(overwrite=False, create_parent=True)
            with self._client.create(beside, options) as file:
                view = memoryview(content)
                while view:
                    view = view[file.write(view[:_PIECE]) :]
            return beside

        return self._run("writing", path, write)

    def _rename(self, beside: str, path: str, *, is_new: bool) -> None:
        full = self._full(path)
        self._open.pop(path, None)

        def rename() -> None:
            try:
                self._client.rename(beside, full, not is_new)
            except FileNotFoundError:
                # A rename whose answer was lost has happened: nobody else knows the name beside.
                return

        self._run("renaming", path, rename)

    def _drop(self, full: str) -> None:
        with suppress(Exception):
            within(self._settings.timeout, lambda: self._client.delete(full, False))

    def _run(self, what: str, path: str, action: Callable[[], Result]) -> Result:
        return self._attempts.run(what, path, lambda: self._once(path, action))

    def _once(self, path: str, action: Callable[[], Result]) -> Result:
        try:
            return within(self._settings.timeout, action)
        except FileNotFoundError:
            raise missing(self._address, path) from None
        except FileExistsError:
            raise already_there(self._address, path) from None
        except Transient:
            raise
        except Exception as error:
            said = str(error)
            if "FileAlreadyExists" in said or "already exists" in said.lower():
                raise already_there(self._address, path) from None
            if "checksum" in said.lower():
                raise WrongBytes(
                    f"{join(self._address, path)}: {said}; no copy agrees with its checksum",
                    address=self._address,
                    path=path,
                ) from error
            raise Transient(f"{type(error).__name__}: {said}") from error

    def _full(self, path: str) -> str:
        return f"/{check_path(self._address, path)}"


def _read_range(reader: Any, at: int, size: int) -> bytes:
    return bytes(reader.read_range(at, size))


def _entry(path: str, found: Any) -> Entry:
    return Entry(path=path, size=found.length, version=f"{found.modification_time}-{found.length}")
