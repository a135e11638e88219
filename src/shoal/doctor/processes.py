"""Which processes of this user belong to a run of ours, and which of those have outlived their supervisor.

A rank carries its run and its supervisor in its environment, and so does everything that it starts. Nothing else identifies it:
names and command lines are anybody's, and a process that is only named like ours must never be killed.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# A process and its supervisor can start within one tick of the clock that the kernel stamps them with.
_CLOCK_SLACK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class OurProcess:
    """A live process that was started for a run."""

    pid: int
    started: float
    """When, on the wall clock; with the pid it names a process for ever, since pids are used again."""
    run_id: str
    run_dir: str | None
    supervisor_pid: int
    is_orphan: bool
    """True when its supervisor is dead."""
    command: str

    def is_below(self, runs: Path) -> bool:
        """True when its run directory is ``runs`` or inside it."""
        return self.run_dir is not None and Path(self.run_dir).resolve().is_relative_to(runs.resolve())


def our_processes() -> tuple[OurProcess, ...]:
    """Every live process of this user that was started for a run, this one and its ancestors excepted."""
    me = psutil.Process()
    excepted = {me.pid, *(parent.pid for parent in me.parents())}
    found = []
    for process in same_user_processes():
        if process.pid not in excepted and (ours := _recognise(process)) is not None:
            found.append(ours)
    return tuple(sorted(found, key=lambda ours: ours.pid))


def same_user_processes() -> Iterator[psutil.Process]:
    """The processes that this user may look into, in this container only."""
    uid = os.getuid()
    home = _pid_namespace(os.getpid())
    for process in psutil.process_iter():
        try:
            # A container's processes are visible from outside, but the pids that they know each other by mean others here.
            if process.uids().real == uid and _pid_namespace(process.pid) == home:
                yield process
        except psutil.Error:
            continue


def is_alive(pid: int, *, started_before: float | None = None) -> bool:
    """True when the process runs; with ``started_before``, only if it is old enough to be the one that was meant."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return started_before is None or process.create_time() <= started_before + _CLOCK_SLACK_SECONDS
    except psutil.Error:
        return False


def _recognise(process: psutil.Process) -> OurProcess | None:
    try:
        environment = process.environ()
        run_id = environment.get("TORCHELASTIC_RUN_ID")
        supervisor = environment.get("SHOAL_SUPERVISOR_PID", "")
        if not run_id or not supervisor.isdigit() or process.status() == psutil.STATUS_ZOMBIE:
            return None
        started = process.create_time()
        return OurProcess(
            pid=process.pid,
            started=started,
            run_id=run_id,
            run_dir=environment.get("SHOAL_RUN_DIR"),
            supervisor_pid=int(supervisor),
            is_orphan=not is_alive(int(supervisor), started_before=started),
            command=" ".join(process.cmdline())[:120],
        )
    except (psutil.Error, OSError):
        return None


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(Path("/proc") / str(pid) / "ns" / "pid")
    except OSError:
        return None
