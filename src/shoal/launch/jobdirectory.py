"""The directory of a job with parameter servers: its sockets, leases and arenas on this machine, in memory, for this user alone.

The job holds a lock on it for as long as it lives. A job that was killed leaves its directory behind unlocked, and the next one
that starts, or the doctor, removes it.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "shoal-job-"
_LOCK = "job.lock"
_FRESH_SECONDS = 60.0
"""A folder without a lock may be one that is just being made."""


class JobDirectory:
    """A new folder, held until ``remove``."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent or job_directories_parent()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_job_directories(parent: Path | None = None) -> list[Path]:
    """Remove the directories of jobs that are dead, and return which they were."""
    removed = dead_job_directories(parent or job_directories_parent())
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def dead_job_directories(parent: Path) -> list[Path]:
    """The directories below ``parent`` that jobs of this user left when they were killed; nothing is changed."""
    return [path for path in sorted(parent.glob(f"{_PREFIX}*")) if is_dead(path)]


def is_dead(path: Path) -> bool:
    """Whether this is the directory of a job of this user that is no more."""
    try:
        status = path.lstat()
        if status.st_uid != os.geteuid() or path.is_symlink():
            return False
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return path.is_dir() and time.time() - status.st_mtime > _FRESH_SECONDS
    except OSError:
        return False
    try:
        # Shared, and let go at once: two who look do not take each other for a job.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def job_directories_parent() -> Path:
    """Where jobs have their directories: a place in memory where the system has one."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
