"""Processes and threads that a test has left behind, found in microseconds: the kernel lists the children of each thread."""

import os
import sys
import threading
from pathlib import Path

import psutil

from support.processes import warm

KEPT = ("resource_tracker", "shoal.launch.forkserver shoal.testing.ranks", "/chromium --type=", "/chrome --type=")
"""The resource tracker of multiprocessing and the process that ranks are forked from live as long as the test session does, as
does the one that commands are forked from. A browser starts and ends helpers of its own as it likes; they end with it."""

THREADS = ("event-log", "prefetch", "shoal-saver")
"""Threads of ours that end with what started them; libraries keep some of theirs for as long as a process lives."""


def threads_left(before: set[threading.Thread]) -> list[str]:
    """The names of living threads that were not there ``before`` and should have ended; each gets a second to do so."""
    new = [thread for thread in threading.enumerate() if thread.name in THREADS and thread not in before]
    for thread in new:
        thread.join(1.0)
    return [thread.name for thread in new if thread.is_alive()]


def descendants(pid: int) -> set[int]:
    """The children of a process, theirs, and so on."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def left_behind(before: set[int]) -> dict[int, str]:
    """The command lines of living descendants of this process that were not there ``before``, without those that are kept."""
    new = descendants(os.getpid()) - before - warm.server_pids()
    found = {pid: _command_line(pid) for pid in sorted(new) if not _is_dead(pid)}
    return {pid: line for pid, line in found.items() if not any(name in line for name in KEPT)}


def _children(pid: int) -> list[int]:
    if sys.platform != "linux":
        return [child.pid for child in psutil.Process(pid).children()]
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        pass  # It has ended meanwhile.
    return [int(word) for word in found]


def _command_line(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        # One that is ending has no arguments any more.
        return " ".join(process.cmdline()) or f"/{process.name()} --type="
    except psutil.NoSuchProcess:
        return ""


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
