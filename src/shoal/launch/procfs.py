"""What the kernel knows about a process that the process cannot say itself. Every answer may be None: elsewhere than Linux there
is no ``/proc``, and a process may be gone."""

import os
from pathlib import Path


def process_state(pid: int) -> str | None:
    """The kernel's letter for what a process does: R runs, S sleeps, D waits for a disk, T is stopped, Z is dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may itself hold any character, so look behind the last one.
    return text.rpartition(")")[2].split()[0]


def catches_signal(pid: int, number: int) -> bool:
    """False where a process has no handler for a signal, so that it would die of it; True where that is not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), -1)
    return bool(caught >> (number - 1) & 1)


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    # A process that has died and was not waited for yet has no memory any more; that is no measurement.
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") or None


def total_memory_bytes() -> int | None:
    """Memory of this machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def count_oom_kills() -> int | None:
    """Processes that the out-of-memory killer has killed since the machine started."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def peak_resident_bytes(pid: int) -> int:
    """The most memory that a process has ever had resident; 0 when it is gone or the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
