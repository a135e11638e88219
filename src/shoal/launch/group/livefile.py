"""``live.json``: where every process of a run is now, rewritten each second by whoever watches them.

The status board is memory of the supervisor and its ranks. This file is what others can see of it: a page or a terminal anywhere
on the file system learns from it which rank hangs in which phase, also of a run on another host, and asks no process for it.

It is written in one piece, so that a reader finds the old text or the new one. Nothing waits for it and nothing depends on it: a
disk that is full, or a folder that was removed, costs the file and is tried again later.
"""

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shoal.core.rundir import RunDir, replace_text
from shoal.launch.hangs import is_waiting
from shoal.launch.process import Process
from shoal.launch.procfs import resident_bytes
from shoal.telemetry.eventlog import plain_json
from shoal.telemetry.statusboard import StatusReading

SILENT_SECONDS = 0.75
"""A process whose last heartbeat is older is silent; it beats four times a second."""
_STALL_SECONDS = 10.0
_STALL_FACTOR = 3.0
"""All stand still for longer than this many times what any phase has taken, and at least for so many seconds: that is a hang."""

State = Literal["running", "silent", "ended"]


@dataclass(frozen=True, kw_only=True)
class LiveProcess:
    """One process as its supervisor sees it."""

    state: StatusReading
    name: str = ""
    """Of a role; empty for a rank, which has its number."""
    host: str = ""
    """Left out, this one."""
    pid: int
    is_running: bool
    rss_bytes: int | None = None
    """Left out, what the process itself last said."""
    has_phases: bool = True
    """False for a process that enters none, and stands still when nobody asks it."""

    @classmethod
    def of(
        cls,
        state: StatusReading,
        process: Process,
        *,
        name: str = "",
        rss_bytes: int | None = None,
        has_phases: bool = True,
    ) -> "LiveProcess":
        """Of a process of this host."""
        return cls(
            state=state,
            name=name,
            pid=process.pid,
            is_running=process.is_running,
            rss_bytes=rss_bytes,
            has_phases=has_phases,
        )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A process with what was seen of it over time."""

    process: LiveProcess
    phase: str
    heartbeat_age: float | None
    phase_seconds: float
    is_local: bool
    """It runs on this host."""

    @property
    def state(self) -> State:
        if not self.process.is_running:
            return "ended"
        return "silent" if self.heartbeat_age is not None and self.heartbeat_age > SILENT_SECONDS else "running"

    def _measured(self) -> int | None:
        is_here = self.is_local and self.process.is_running
        return resident_bytes(self.process.pid) if is_here else None

    def as_values(self) -> dict[str, Any]:
        process, reading = self.process, self.process.state
        named = {"name": process.name} if process.name else {}
        return {
            "rank": reading.rank,
            **named,
            "host": process.host,
            "pid": process.pid,
            "step": reading.step or reading.metrics.get("step") or 0,
            "phase": self.phase,
            "phase_seconds": round(self.phase_seconds, 3),
            "heartbeat_age": None if self.heartbeat_age is None else round(self.heartbeat_age, 3),
            "rss_bytes": process.rss_bytes or reading.metrics.get("rss_bytes") or self._measured(),
            "state": self.state,
            "metrics": dict(reading.metrics),
        }


class LiveFile:
    """The file of one run, over all starts of its ranks.

    Args:
        run_dir: where it lies.
        plan: what runs.
        seconds: between two writings, at least; 0 for never.
    """

    def __init__(self, run_dir: Path, *, plan: str, seconds: float) -> None:
        self._path = RunDir(run_dir).live
        self._plan, self._seconds = plan, seconds
        self._host = socket.gethostname()
        self._rows: Sequence[_Row] = ()
        self._generation = 0
        self._since: dict[int, tuple[int, int, float]] = {}
        """By rank: process, phases entered, and since when that was seen."""
        self._longest = 0.0
        """That any phase has taken so far."""
        self._written = -math.inf

    def update(self, processes: Sequence[LiveProcess], *, generation: int = 0) -> None:
        """Look at the processes, and write the file if it is time to; to be called several times a second."""
        if not self._seconds:
            return
        now = time.monotonic()
        self._generation = generation
        self._rows = [self._look(process, now) for process in processes]
        if now - self._written >= self._seconds:
            self._write("running", now)

    def end(self) -> None:
        """Say that nobody watches any more, and where everyone was at last."""
        if self._seconds:
            self._write("ended", time.monotonic())

    def _look(self, process: LiveProcess, now: float) -> _Row:
        reading = process.state
        # Until it has signed its status, what is there is that of the process before it.
        is_own = reading.pid == process.pid
        age = now - reading.heartbeat if is_own and reading.heartbeat is not None else None
        pid, count, since = self._since.get(reading.rank, (0, 0, now))
        if (pid, count) != (process.pid, reading.phase_count):
            if pid == process.pid and process.has_phases:
                self._longest = max(self._longest, now - since)
            since = now
            self._since[reading.rank] = (process.pid, reading.phase_count, now)
        return _Row(
            process=process if process.host else replace(process, host=self._host),
            phase=reading.phase if is_own else "",
            heartbeat_age=None if age is None else max(0.0, age),
            phase_seconds=now - since,
            is_local=not process.host,
        )

    def _write(self, status: Literal["running", "ended"], now: float) -> None:
        self._written = now
        hang = find_live_hang(self._rows, longest=self._longest) if status == "running" else None
        values = {
            "t": round(time.time(), 3),
            "generation": self._generation,
            "status": status,
            "plan": self._plan,
            "pid": os.getpid(),
            "host": self._host,
            "ranks": [row.as_values() for row in self._rows],
            "hang": hang,
        }
        try:
            replace_text(self._path, plain_json(values) + "\n")
        except (OSError, ValueError):
            # A full disk or a folder that is gone: the run does without, and what was half written is of no use.
            with contextlib.suppress(OSError):
                self._path.with_name(f".{self._path.name}.{os.getpid()}").unlink()


def find_live_hang(rows: Sequence[_Row], *, longest: float) -> Mapping[str, Any] | None:
    """The process that holds the others up, its phase and since when; None while all get on.

    Sooner than the deadlines at which a run is ended (``launch/hangs.py``), because a page only shows it: a process that is
    silent, or, where all stand still for much longer than any phase has taken, the first that does not wait for others.

    Args:
        rows: all processes.
        longest: seconds that any phase has taken so far.
    """
    silent = [row for row in rows if row.state == "silent"]
    if silent:
        worst = max(silent, key=lambda row: row.heartbeat_age or 0.0)
        return _hang_of(worst, worst.heartbeat_age or 0.0)
    running = [row for row in rows if row.state == "running" and row.process.has_phases]
    limit = max(_STALL_SECONDS, _STALL_FACTOR * longest)
    if not running or any(row.phase_seconds <= limit for row in running):
        return None
    busy = [row for row in running if not is_waiting(row.phase)] or running
    worst = min(busy, key=lambda row: (row.process.state.phase_count, row.process.state.rank))
    return _hang_of(worst, worst.phase_seconds)


def _hang_of(row: _Row, seconds: float) -> dict[str, Any]:
    named = {"name": row.process.name} if row.process.name else {}
    return {"rank": row.process.state.rank, **named, "phase": row.phase, "seconds": round(seconds, 3)}
