"""Files of a run directory, read as strangers' files are: only inside the folder, only plain files, never without an end.

A run directory may be anybody's. Its event file may be a FIFO that nobody writes to, a link to a secret, or a line of a terabyte;
and it grows, is truncated or replaced while it is read. ``open_inside`` is the one way in; a ``Cursor`` follows a file of lines.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES = 1 << 20
"""A longer line is no event; the longest of ours have a few kilobytes."""
BLOCK_BYTES = 1 << 20
_SMALL_BYTES = 4 << 20
_TAIL_BYTES = 256


# What a value of another type or size than was thought of raises, where a stranger's file is looked into.
STRANGE = (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError)


class Refused(Exception):
    """A file that is not read, and why."""


class Unreadable(Refused):
    """A file or folder that the system does not let us read now: it may the next time."""


def why(error: OSError) -> str:
    """What the system says, in words."""
    return error.strerror or type(error).__name__


@dataclass(frozen=True)
class Identity:
    """Which file it is, whatever its name, and how long."""

    device: int
    inode: int
    size: int
    changed: int
    """When it was written last, in nanoseconds."""

    @classmethod
    def of(cls, status: os.stat_result) -> "Identity":
        """From what the system says of a file."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def open_inside(root: Path, path: Path) -> int:
    """A descriptor to read a plain file that lies in a folder, links followed.

    Args:
        root: the folder, without links.
        path: of the file.

    Raises:
        Refused: it is no plain file, or a way out of the folder.
        OSError: it is not there, or cannot be read.
    """
    # Looked at first: to open a device may already do something.
    _refuse_unless_plain(os.stat(path))
    # A FIFO that took its place meanwhile is opened without waiting for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _refuse_unless_plain(os.fstat(descriptor))
        # Of what was opened, not of the name, which may lead elsewhere by now.
        real = os.readlink(f"/proc/self/fd/{descriptor}")
        if not real.startswith(f"{str(root).rstrip('/')}/"):
            raise Refused("it is a link that leads out of the folder")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_unless_plain(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
        raise Refused(f"it is {kinds.get(stat.S_IFMT(status.st_mode), 'a device')} and no plain file")


def read_small(root: Path, path: Path, most: int = _SMALL_BYTES) -> bytes | None:
    """All of a small file; None where it is not there.

    Raises:
        Refused: it is none that may be read, or longer than ``most``.
        Unreadable: the system refuses, as it does for lack of rights or where a file server is away.
    """
    try:
        with os.fdopen(open_inside(root, path), "rb") as file:
            data = file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unreadable(why(error)) from error
    if len(data) > most:
        raise Refused(f"it has more than {most} bytes")
    return data


def list_inside(root: Path, folder: Path, most: int = 10_000) -> list[str]:
    """The names in a folder that lies in another, sorted; none where it is not there or is elsewhere.

    Raises:
        Unreadable: the system refuses.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unreadable(why(error)) from error
    try:
        real = os.readlink(f"/proc/self/fd/{descriptor}")
        if real != str(root) and not real.startswith(f"{str(root).rstrip('/')}/"):
            return []
        return sorted(os.listdir(descriptor))[:most]
    except OSError as error:
        raise Unreadable(why(error)) from error
    finally:
        os.close(descriptor)


def read_range(root: Path, path: Path, start: int, length: int) -> bytes:
    """Some bytes of a file.

    Raises:
        Refused: it is none that may be read.
        OSError: it is not there, or cannot be read.
    """
    descriptor = open_inside(root, path)
    try:
        return os.pread(descriptor, length, max(start, 0))
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Block:
    """Whole lines of a file."""

    data: bytes
    start: int
    """Where in the file."""


class Cursor:
    """A place in a file of lines that grows: only what is new is read, and only whole lines are handed out.

    Args:
        root: the folder that the file must lie in, without links.
        path: of the file.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        self.identity = Identity(0, 0, 0, 0)
        """Of the file as it was read last."""
        self.offset = 0
        """Bytes of whole lines that were handed out or skipped."""
        self.oversized = 0
        """Lines that were skipped for their length."""
        self.tail = b""
        """The last bytes before ``offset``: a file that has others there was written anew."""
        self.is_skipping = False
        """True while the end of a line that is too long has not come."""

    def has_changed(self) -> bool:
        """True when there is something to read, or to begin again.

        Raises:
            OSError: the file is not there.
        """
        return Identity.of(os.stat(self.path)) != self.identity

    def is_other_file(self, descriptor: int) -> bool:
        """True when what was read is not what the file begins with."""
        found = Identity.of(os.fstat(descriptor))
        if self.offset == 0:
            return False
        if found.size < self.offset or (self.identity.inode and (found.device, found.inode) != self._number):
            return True
        return os.pread(descriptor, len(self.tail), self.offset - len(self.tail)) != self.tail

    @property
    def _number(self) -> tuple[int, int]:
        return self.identity.device, self.identity.inode

    def restart(self) -> None:
        """Go to the beginning, as of a file that was never read."""
        self.identity = Identity(0, 0, 0, 0)
        self.offset, self.oversized, self.tail, self.is_skipping = 0, 0, b"", False

    def read(self, descriptor: int) -> Block | None:
        """The next whole lines, at most a block of them; None where there are none yet."""
        while True:
            data = os.pread(descriptor, BLOCK_BYTES, self.offset)
            start = self.offset
            if self.is_skipping:
                end = data.find(b"\n") + 1
                self._advance(data[: end or len(data)])
                self.is_skipping = not end
                if end or data:
                    continue
                return None
            end = data.rfind(b"\n") + 1
            if end:
                self._advance(data[:end])
                return Block(data[:end], start)
            if len(data) < LINE_BYTES:
                return None  # A line that is still being written.
            self.oversized += 1
            self.is_skipping = True

    def _advance(self, data: bytes) -> None:
        self.offset += len(data)
        self.tail = (self.tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
