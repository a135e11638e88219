"""What every storage can do, and the errors that all of them raise.

The interface is what a training system needs of a store and what all of them can keep: exact reads of a range, a sorted listing,
a write that is whole or absent, and an exclusive create, on which a commit can be built. ``fsspec`` has three times as many
operations, and leaves to each file system what an exclusive create, a short read or a retry is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shoal.core.errors import RequestError, RunError, ShoalError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file."""

    path: str
    """Inside the storage, with ``/`` between folders and none at its beginning."""
    size: int
    version: str
    """Differs when the content does: an etag, or time and inode of a local file; empty where the store says nothing."""


class StorageError(ShoalError):
    """Something went wrong with one path of a storage."""

    def __init__(self, message: str, *, address: str, path: str) -> None:
        super().__init__(message)
        self.address = address
        self.path = path


class Missing(StorageError, RequestError):
    """There is no such file."""


class AlreadyThere(StorageError, RunError):
    """Somebody else has created the file first."""


class Unreachable(StorageError, RunError):
    """The store did not answer, or answered that it cannot, until the deadline or the last retry."""


class Truncated(StorageError, RunError):
    """The file is shorter than the bytes that were asked for."""


class WrongBytes(StorageError, RunError):
    """What was read does not agree with the checksum that was kept of it."""


class NoListing(StorageError, RequestError):
    """The store cannot say which files it has, as a web server cannot."""


class Storage(Protocol):
    """The files of one store. Paths are inside it. Every operation ends within the deadline of its settings."""

    @property
    def address(self) -> str:
        """What the paths are relative to, as errors name it."""

    def stat(self, path: str) -> Entry:
        """Size and version of a file.

        Raises:
            Missing: there is none.
            Unreachable: the store did not answer.
        """

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly the bytes from ``start`` up to ``end``, or to the end of the file.

        Raises:
            Missing: there is no such file.
            Truncated: it ends before ``end``.
            Unreachable: the store did not answer.
            WrongBytes: the store's own checksum does not agree.
        """

    def list(self, folder: str) -> Iterator[Entry]:
        """All files in a folder and the folders in it, sorted by path; none where there is no such folder.

        Raises:
            NoListing: this kind of store does not list.
            Unreachable: the store did not answer.
        """

    def create(self, path: str, content: bytes) -> None:
        """Write a file that is not there yet. Of several who try, exactly one succeeds; nobody ever sees a part of the content.

        Raises:
            AlreadyThere: somebody was first.
            Unreachable: the store did not answer; the file may be there or not, and never in part.
        """

    def replace(self, path: str, content: bytes) -> None:
        """Write a file, over the one that is there: readers see the old content or the new.

        Raises:
            Unreachable: the store did not answer.
        """

    def delete(self, path: str) -> None:
        """Delete a file; nothing happens where there is none.

        Raises:
            Unreachable: the store did not answer.
        """


def missing(address: str, path: str) -> Missing:
    """The error about a file that is not there."""
    return Missing(f"{join(address, path)}: there is no such file", address=address, path=path)


def already_there(address: str, path: str) -> AlreadyThere:
    """The error about a file that somebody created first."""
    return AlreadyThere(
        f"{join(address, path)} is there already; it was created by somebody else", address=address, path=path
    )


def truncated(address: str, path: str, wanted: int, size: int) -> Truncated:
    """The error about a file that ends too early."""
    return Truncated(
        f"{join(address, path)} ends at byte {size}, and bytes up to {wanted} were asked for; it was cut short or replaced",
        address=address,
        path=path,
    )


def join(address: str, path: str) -> str:
    """An address with a path in it, as people would write it."""
    return f"{address.rstrip('/')}/{path}" if path else address


def check_path(address: str, path: str) -> str:
    """The path itself.

    Raises:
        RequestError: it leaves the storage, or is none.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "\0" in path:
        raise RequestError(f"{path!r} is no path inside {address}; name a file without leading / and without ..")
    return path
