"""What dead runs leave behind, and its removal: processes, half-written checkpoints, locks, shared memory, job directories.

A run that ends in any way it can see cleans up after itself; this is for those that were killed. Finding is apart from mending,
and mending looks again before it touches anything: only what belongs to this user and to a run that is dead is ours to remove.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from shoal.core.clock import Deadline
from shoal.core.rundir import RunDir
from shoal.core.units import format_bytes
from shoal.doctor.processes import OurProcess, is_alive, our_processes, same_user_processes
from shoal.launch.jobdirectory import dead_job_directories, is_dead
from shoal.launch.runlock import release_lock, take_lock

END_DEADLINE_SECONDS = 5.0
SHARED_MEMORY = Path("/dev/shm")

_POLL_SECONDS = 0.02
_SEGMENT = re.compile(r"torch_(\d+)_\d+(?:_\d+)?")


@dataclass(frozen=True, kw_only=True)
class Saves:
    """What the checkpoint room knows of its own leftovers. The caller brings it, because the two rooms do not know each other."""

    is_leftover: Callable[[str], bool]
    """Whether a name in a ``checkpoints`` folder is one that a dead save leaves."""
    sweep: Callable[[Path], Sequence[str]]
    """Removes leftovers from a ``checkpoints`` folder, puts back what was only set aside, and says what it did."""


class Kind(StrEnum):
    """What kind of thing was left."""

    PROCESS = "process"
    CHECKPOINT = "checkpoint"
    LOCK = "lock"
    SHARED_MEMORY = "shared memory"
    JOB = "job directory"


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """One thing that a dead run left behind."""

    kind: Kind
    what: str
    why: str
    """What is wrong with it."""
    path: Path | None = None
    pid: int | None = None
    """The process itself, or the dead one that owned it."""
    started: float | None = None


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What came of mending one leftover."""

    done: bool
    said: str


def find_leftovers(
    runs: Path, ours: Sequence[OurProcess], saves: Saves, *, shared_memory: Path | None, jobs: Path | None = None
) -> tuple[Leftover, ...]:
    """Everything that dead runs left: among these processes, below ``runs`` (a folder of runs, or one), in shared memory.

    Args:
        runs: a folder of runs, or one of them.
        ours: the processes to look among.
        saves: what the checkpoint room knows.
        shared_memory: where torch keeps its segments; None leaves them out.
        jobs: where jobs with parameter servers have their directories; None leaves them out.
    """
    return (
        *_orphans(ours),
        *_abandoned_saves(runs, ours, saves),
        *_stale_locks(runs),
        *_stale_segments(shared_memory),
        *_dead_jobs(jobs),
    )


def mend(leftover: Leftover, saves: Saves) -> Mended:
    """Remove one leftover, if it still is one, and say what was done."""
    try:
        match leftover.kind:
            case Kind.PROCESS:
                return _end_process(leftover)
            case Kind.CHECKPOINT:
                return _sweep_saves(leftover, saves)
            case Kind.LOCK:
                return _remove_lock(leftover)
            case Kind.SHARED_MEMORY:
                return _remove_segment(leftover)
            case Kind.JOB:
                return _remove_job(leftover)
    except OSError as error:
        return Mended(done=False, said=f"could not remove it: {error.strerror or error}")


def run_is_live(run: Path, ours: Iterable[OurProcess]) -> bool:
    """True when a process holds the run's lock, or a rank of the run is still there, an orphan too."""
    return _is_locked(RunDir(run).lock) or _has_rank(run, ours)


def _has_rank(run: Path, ours: Iterable[OurProcess]) -> bool:
    place = run.resolve()
    return any(process.run_dir is not None and Path(process.run_dir).resolve() == place for process in ours)


def _orphans(ours: Iterable[OurProcess]) -> Iterator[Leftover]:
    for process in ours:
        if process.is_orphan:
            yield Leftover(
                kind=Kind.PROCESS,
                what=f"process {process.pid} ({process.command})",
                why=f"rank of run {process.run_id} whose supervisor {process.supervisor_pid} is dead",
                pid=process.pid,
                started=process.started,
            )


def _abandoned_saves(runs: Path, ours: Sequence[OurProcess], saves: Saves) -> Iterator[Leftover]:
    for run in _run_directories(runs):
        root = RunDir(run).checkpoints
        names = _abandoned_names(root, saves)
        if names and not run_is_live(run, ours):
            why = "left by saves that never ended, in a run that is not running"
            yield Leftover(kind=Kind.CHECKPOINT, what=f"{root}: {', '.join(names)}", why=why, path=root)


def _stale_locks(runs: Path) -> Iterator[Leftover]:
    for run in _run_directories(runs):
        lock = RunDir(run).lock
        pid = _lock_holder(lock)
        if pid is not None and not _is_locked(lock) and not is_alive(pid, started_before=lock.stat().st_mtime):
            yield Leftover(
                kind=Kind.LOCK, what=str(lock), why=f"names process {pid}, which is dead", path=lock, pid=pid
            )


def _stale_segments(shared_memory: Path | None) -> Iterator[Leftover]:
    if shared_memory is None or not shared_memory.is_dir():
        return
    named = [(path, match) for path in sorted(shared_memory.iterdir()) if (match := _SEGMENT.fullmatch(path.name))]
    dead = [(path, int(match[1])) for path, match in named if _is_mine(path) and not is_alive(int(match[1]))]
    # Reading the maps of every process is slow, so it is done only when there is something to lose.
    used = _paths_in_use() if dead else frozenset()
    for path, pid in dead:
        if str(path) not in used:
            why = f"{format_bytes(path.stat().st_size)} of shared memory of process {pid}, which is dead"
            yield Leftover(kind=Kind.SHARED_MEMORY, what=str(path), why=why, path=path, pid=pid)


def _dead_jobs(jobs: Path | None) -> Iterator[Leftover]:
    for path in dead_job_directories(jobs) if jobs is not None else ():
        num_bytes = sum(_size_of(file) for file in path.rglob("*"))
        why = f"{format_bytes(num_bytes)} of parameter servers whose supervisor is dead"
        yield Leftover(kind=Kind.JOB, what=str(path), why=why, path=path)


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # a run that is just starting sweeps it
        return 0


def _run_directories(runs: Path) -> list[Path]:
    if not runs.is_dir():
        return []
    if RunDir(runs).checkpoints.is_dir() or RunDir(runs).recipe.is_file() or RunDir(runs).lock.is_file():
        return [runs]
    return sorted(path for path in runs.iterdir() if path.is_dir())


def _end_process(leftover: Leftover) -> Mended:
    assert leftover.pid is not None and leftover.started is not None
    gone = Mended(done=True, said=f"process {leftover.pid} had already ended")
    try:
        process = psutil.Process(leftover.pid)
        if process.create_time() != leftover.started:
            return gone
        # psutil compares the creation time once more, so a pid that was used again is never hit.
        process.kill()
    except psutil.NoSuchProcess:
        return gone
    except psutil.AccessDenied:
        return Mended(done=False, said=f"process {leftover.pid} may not be ended by this user")
    deadline = Deadline(seconds=END_DEADLINE_SECONDS)
    # It is no child of ours, so there is nothing to wait on; a zombie whose new parent does not reap it has ended all the same.
    while is_alive(leftover.pid, started_before=leftover.started):
        if deadline.is_over:
            said = f"process {leftover.pid} was killed and is still there after {END_DEADLINE_SECONDS:g} s"
            return Mended(done=False, said=said)
        time.sleep(_POLL_SECONDS)
    return Mended(done=True, said=f"ended process {leftover.pid}")


def _sweep_saves(leftover: Leftover, saves: Saves) -> Mended:
    root = leftover.path
    assert root is not None
    run = root.parent
    with _hold(RunDir(run).lock) as held:
        if not held or _has_rank(run, our_processes()):
            return Mended(done=False, said="left alone: the run is running again")
        said = saves.sweep(root)
    kept = _abandoned_names(root, saves)
    return Mended(done=not kept, said="; ".join([*said, *(f"could not remove {name}" for name in kept)]))


def _remove_lock(leftover: Leftover) -> Mended:
    assert leftover.path is not None
    with _hold(leftover.path) as held:
        if not held:
            return Mended(done=False, said="left alone: a run holds it now")
    return Mended(done=True, said="removed it")


def _remove_segment(leftover: Leftover) -> Mended:
    assert leftover.path is not None and leftover.pid is not None
    if is_alive(leftover.pid):
        return Mended(done=False, said=f"left alone: there is a process {leftover.pid} now")
    leftover.path.unlink(missing_ok=True)
    return Mended(done=True, said="removed it")


def _remove_job(leftover: Leftover) -> Mended:
    path = leftover.path
    assert path is not None
    if is_dead(path):
        shutil.rmtree(path)
    elif path.exists():
        return Mended(done=False, said="left alone: a run holds it now")
    return Mended(done=True, said="removed it")


@contextlib.contextmanager
def _hold(lock: Path) -> Iterator[bool]:
    """Hold a run's lock as a run does, and give it up as a run does."""
    fd = take_lock(lock)
    if fd is None:
        yield False
        return
    try:
        yield True
    finally:
        release_lock(fd, lock)


def _abandoned_names(root: Path, saves: Saves) -> list[str]:
    if not root.is_dir():
        return []
    return sorted(path.name for path in root.iterdir() if saves.is_leftover(path.name) and _is_mine(path))


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _lock_holder(lock: Path) -> int | None:
    """The pid that a lock's text names; None when there is no such lock of this user's."""
    try:
        text = lock.read_text().strip() if _is_mine(lock) else ""
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            # Shared, and let go at once: two doctors do not take each other for a run.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _paths_in_use() -> frozenset[str]:
    """Every file that some process of this user has open or mapped; a segment in here is in use whatever its name says."""
    found: set[str] = set()
    for process in same_user_processes():
        with contextlib.suppress(psutil.Error, OSError):
            found.update(file.path for file in process.open_files())
            found.update(entry.path for entry in process.memory_maps(grouped=True))
    return frozenset(found)
