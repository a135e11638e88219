"""Files of this machine, or of a file system that is mounted here.

A file is written beside its place and moved there when it is on the disk: by a hard link, which fails where the name is taken, or
by a rename, which replaces.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal.data.storage.config import StorageConfig
from shoal.data.storage.protocol import Entry, Unreachable, already_there, check_path, join, missing, truncated

_BESIDE = ".shoal-writing-"
"""How names of files begin that are being written. A listing leaves them out."""


class LocalStorage:
    """The folder ``root`` and everything in it."""

    def __init__(self, root: Path, settings: StorageConfig | None = None) -> None:
        self._root = root
        # A local file system has no requests that could be made again; what it refuses it refuses for good.
        self._settings = settings or StorageConfig()

    @property
    def address(self) -> str:
        """The folder, as errors name it."""
        return str(self._root)

    def local_path(self, path: str) -> Path:
        """Where the file is, for those who can map it into memory."""
        return self._root / check_path(self.address, path)

    def stat(self, path: str) -> Entry:
        """Size and version of a file."""
        try:
            found = os.stat(self.local_path(path))
        except (FileNotFoundError, NotADirectoryError):
            raise missing(self.address, path) from None
        except OSError as error:
            raise self._refused(path, error) from error
        if not os.path.isfile(self.local_path(path)):
            raise missing(self.address, path)
        return _entry(path, found)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly these bytes."""
        try:
            with open(self.local_path(path), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                until = size if end is None else end
                if until > size or start > size:
                    raise truncated(self.address, path, max(start, until), size)
                content = bytearray(max(0, until - start))
                view, at = memoryview(content), 0
                while at < len(content):
                    count = os.preadv(file.fileno(), [view[at:]], start + at)
                    if not count:
                        raise truncated(self.address, path, until, start + at)
                    at += count
                return bytes(content)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise missing(self.address, path) from None
        except OSError as error:
            raise self._refused(path, error) from error

    def list(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, sorted by path."""
        top = self.local_path(folder) if folder.strip("/") else self._root
        found = []
        prefix = len(str(self._root).rstrip("/")) + 1
        for at, _, names in os.walk(top, followlinks=True):
            for name in names:
                if name.startswith(_BESIDE):
                    continue
                # A file that goes while the folder is read is not there.
                with suppress(FileNotFoundError):
                    full = os.path.join(at, name)
                    found.append(_entry(full[prefix:], os.stat(full)))
        yield from sorted(found, key=lambda entry: entry.path)

    def create(self, path: str, content: bytes) -> None:
        """Write a file that is not there yet."""
        target = self.local_path(path)
        beside = self._write_beside(target, path, content)
        try:
            os.link(beside, target)
            _sync_folder(target.parent)
        except FileExistsError:
            raise already_there(self.address, path) from None
        except OSError as error:
            raise self._refused(path, error) from error
        finally:
            with suppress(OSError):
                os.unlink(beside)

    def replace(self, path: str, content: bytes) -> None:
        """Write a file, over the one that is there."""
        target = self.local_path(path)
        beside = self._write_beside(target, path, content)
        try:
            os.rename(beside, target)
            _sync_folder(target.parent)
        except OSError as error:
            with suppress(OSError):
                os.unlink(beside)
            raise self._refused(path, error) from error

    def delete(self, path: str) -> None:
        """Delete a file; nothing happens where there is none."""
        try:
            os.unlink(self.local_path(path))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._refused(path, error) from error

    def _write_beside(self, target: Path, path: str, content: bytes) -> Path:
        beside = target.parent / f"{_BESIDE}{secrets.token_hex(8)}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(beside, "xb", buffering=0) as file:
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.unlink(beside)
            raise self._refused(path, error) from error
        return beside

    def _refused(self, path: str, error: OSError) -> Unreachable:
        return Unreachable(f"{join(self.address, path)}: {error.strerror or error}", address=self.address, path=path)


def _entry(path: str, found: os.stat_result) -> Entry:
    return Entry(path=path, size=found.st_size, version=f"{found.st_mtime_ns}-{found.st_ino}")


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
