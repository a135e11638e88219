"""Files in the memory of this process: ``memory://name``, for tests and for data that a script makes."""

import threading
from collections.abc import Iterator

from shoal.data.storage.protocol import Entry, already_there, check_path, missing, truncated

_stores: dict[str, "MemoryStorage"] = {}


class MemoryStorage:
    """Files by path, safe for many threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._files: dict[str, tuple[bytes, int]] = {}
        self._written = 0
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """Its name, as errors have it."""
        return f"memory://{self._name}"

    def stat(self, path: str) -> Entry:
        """Size and version of a file."""
        content, version = self._find(path)
        return Entry(path=path, size=len(content), version=str(version))

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly these bytes."""
        content, _ = self._find(path)
        until = len(content) if end is None else end
        if until > len(content) or start > len(content):
            raise truncated(self.address, path, max(start, until), len(content))
        return content[start:until]

    def list(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, sorted by path."""
        inside = f"{folder.strip('/')}/" if folder.strip("/") else ""
        with self._lock:
            found = sorted((path, len(content), version) for path, (content, version) in self._files.items())
        for path, size, version in found:
            if path.startswith(inside):
                yield Entry(path=path, size=size, version=str(version))

    def create(self, path: str, content: bytes) -> None:
        """Write a file that is not there yet."""
        check_path(self.address, path)
        with self._lock:
            if path in self._files:
                raise already_there(self.address, path)
            self._write(path, content)

    def replace(self, path: str, content: bytes) -> None:
        """Write a file, over the one that is there."""
        check_path(self.address, path)
        with self._lock:
            self._write(path, content)

    def delete(self, path: str) -> None:
        """Delete a file; nothing happens where there is none."""
        with self._lock:
            self._files.pop(check_path(self.address, path), None)

    def _write(self, path: str, content: bytes) -> None:
        self._written += 1
        self._files[path] = bytes(content), self._written

    def _find(self, path: str) -> tuple[bytes, int]:
        with self._lock:
            found = self._files.get(check_path(self.address, path))
        if found is None:
            raise missing(self.address, path)
        return found


def open_memory(name: str) -> MemoryStorage:
    """The storage of this name; all of this process see the same one."""
    return _stores.setdefault(name, MemoryStorage(name))
