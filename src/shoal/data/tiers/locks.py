"""Locks between the processes of a host, which go with the process: the kernel lets go of them when it dies, however it dies."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.core.clock import Deadline

_LONGEST_PAUSE = 0.02


@contextmanager
def locked(file: Path, deadline: Deadline) -> Iterator[bool]:
    """Hold the lock of a file: True; or False when it was not to be had before the deadline.

    Raises:
        OSError: the file cannot be made.
    """
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _wait(fd, deadline)
    finally:
        os.close(fd)


def hold(file: Path) -> int | None:
    """Take the lock of a file for as long as this process lives: its descriptor; None where another process has it."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    if _wait(fd, Deadline(seconds=0.0)):
        return fd
    os.close(fd)
    return None


def _wait(fd: int, deadline: Deadline) -> bool:
    pause = 0.0005
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if deadline.is_over:
                return False
        # flock has no deadline of its own, and an alarm would interrupt the rank's other threads.
        time.sleep(min(pause, deadline.remaining))
        pause = min(2 * pause, _LONGEST_PAUSE)
