"""The lock of a run directory: one process at a time, and the operating system lets go when it dies.

The file is removed on leaving, so that a directory at rest shows no lock. That makes one moment delicate: whoever opened the file
before it was removed, and locks it afterwards, holds a file that is no longer there and keeps nobody out. So a lock counts only
when its file is still at its path.
"""

import fcntl
import os
from pathlib import Path


def take_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, with this process's id in the file; None when another process holds it.

    Raises:
        OSError: the file cannot be made or is a link.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is_at(fd, path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        os.close(fd)


def read_holder(path: Path) -> str:
    """The id of the process that holds, or last held, the lock."""
    try:
        return path.read_text(errors="replace").strip()[:32] or "unknown"
    except OSError:
        return "unknown"


def release_lock(fd: int, path: Path) -> None:
    """Let go; the file goes first, while it is still ours."""
    path.unlink(missing_ok=True)
    os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
