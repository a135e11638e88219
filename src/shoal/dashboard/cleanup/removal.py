"""Removing a run directory: only a real folder inside the folder that was named, recognised as a run, and locked by us meanwhile.

Nothing outside can be reached: the folder is opened without following links, everything below is removed relative to what was
opened, and a link inside is removed itself, not what it leads to.
"""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.core.rundir import RunDir
from shoal.launch.runlock import read_holder, release_lock, take_lock

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_FOLDERS = 32
"""Below each other; a run has four."""


def why_no_run(path: Path) -> str:
    """Why a folder is not a run directory that may be removed; empty where it is one."""
    run = RunDir(path)
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            return "a link or a file, no folder"
        if not _is_plain(run.recipe, stat.S_ISREG):
            return "no recipe.toml of its own"
        if not _is_plain(run.events(0).parent, stat.S_ISDIR):
            return "no folder events of its own"
    except OSError as error:
        return f"it cannot be looked at: {error.strerror}"
    if os.path.ismount(path):
        return "another file system is mounted there"
    return ""


def _is_plain(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        return is_kind(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """True when a process holds the run, or when that cannot be seen; nothing is changed."""
    try:
        lock = os.open(RunDir(path).lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        # Shared, and let go at once: two who look do not take each other for a run.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def size_of(path: Path) -> int:
    """Bytes that a folder takes on the disk, each file once, links not followed."""
    total, seen = 0, set[tuple[int, int]]()
    for folder, _, names in os.walk(path, followlinks=False):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
    return total


def remove_run(path: Path) -> str:
    """Remove a run directory; why it was left, or what could not be removed, and empty when it is gone.

    The run's own lock is held until its files are gone, so that nobody begins to train in what is being removed.
    """
    if reason := why_no_run(path):
        return reason
    lock = RunDir(path).lock
    try:
        held = take_lock(lock)
    except OSError as error:
        return f"its lock cannot be taken: {error.strerror}"
    if held is None:
        return f"in use by process {read_holder(lock)}"
    try:
        problems = list(_remove_inside(path, keep=lock.name))
        if problems:
            return f"{len(problems)} of its files could not be removed, the first {problems[0]}"
        release_lock(held, lock)
        held = None
        path.rmdir()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    finally:
        if held is not None:
            release_lock(held, lock)
    return ""


def _remove_inside(path: Path, *, keep: str) -> Iterator[str]:
    """Remove everything in a folder but the lock, by the folder's descriptor: a path that is swapped for a link leads nowhere.

    Yields:
        What could not be removed.
    """
    folder = os.open(path, _FOLDER)
    try:
        device = os.fstat(folder).st_dev
        # What makes it a run goes last: a removal that is interrupted leaves something that is recognised, and removed again.
        for name in sorted(os.listdir(folder), key=lambda name: (name in ("events", "recipe.toml"), name)):
            if name != keep:
                yield from _remove(name, folder, device, left=_MOST_FOLDERS)
    finally:
        os.close(folder)


def _remove(name: str, parent: int, device: int, *, left: int) -> Iterator[str]:
    try:
        status = os.lstat(name, dir_fd=parent)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
            return
        if status.st_dev != device or left == 0:
            yield f"{name}: {'it is deeper than a run goes' if left == 0 else 'another file system is mounted there'}"
            return
        folder = os.open(name, _FOLDER, dir_fd=parent)
        try:
            for inside in os.listdir(folder):
                yield from _remove(inside, folder, device, left=left - 1)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        yield f"{name}: {error.strerror}"
