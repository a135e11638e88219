"""What the machine has: cores, memory, disk, shared memory and open files, as a process in this container may use them."""

import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

from shoal.core.processor import VARIABLE, WITHOUT_TILES, avoid_hidden_tiles
from shoal.core.units import format_bytes
from shoal.doctor.check import Check, judge

LEAST_MEMORY = 1 << 30
LEAST_DISK = 1 << 30
SCARCE_DISK = 5 << 30
SCARCE_SHARED_MEMORY = 256 << 20
SCARCE_OPEN_FILES = 1024

_CGROUP = Path("/sys/fs/cgroup")


def check_cores() -> Check:
    """Cores that this process may run on, which a container or an affinity mask makes fewer than the machine's."""
    there = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    quota = cpu_quota(_read(_CGROUP / "cpu.max"))
    found = f"{usable} usable of {there}" + (f", limited to {quota:g} by the container" if quota is not None else "")
    scarce = quota is not None and quota < usable
    return judge(
        "cores",
        found,
        values={"cores": there, "usable": usable, "quota": quota},
        note=f"{usable} processes would share {quota:g} cores; start at most {max(1, int(quota or 1))}"
        if scarce
        else None,
    )


def check_tiles(environment: Mapping[str, str] = os.environ) -> Check:
    """Whether products in 16 bits may use the processor's tiles."""
    is_hidden = avoid_hidden_tiles(dict(environment))
    note = (
        f"bfloat16 would end a process here, so Shoal sets {VARIABLE}={WITHOUT_TILES}; set it for scripts without Shoal"
    )
    found = "announced without their shape" if is_hidden else "as announced"
    return judge("tiles", found, values={"is_hidden": is_hidden}, note=note if is_hidden else None)


def check_memory() -> Check:
    """Memory of the machine or of the container, whichever is smaller."""
    memory = psutil.virtual_memory()
    limit = memory_limit(_read(_CGROUP / "memory.max") or _read(_CGROUP / "memory" / "memory.limit_in_bytes"))
    total = memory.total if limit is None else min(memory.total, limit)
    available = min(memory.available, total)
    wrong = f"only {format_bytes(available)} are available, below {format_bytes(LEAST_MEMORY)}; end what uses the rest"
    return judge(
        "memory",
        f"{format_bytes(available)} available of {format_bytes(total)}",
        values={"total_bytes": total, "available_bytes": available},
        wrong=wrong if available < LEAST_MEMORY else None,
    )


def check_disk(runs: Path) -> Check:
    """Room for run directories, at ``runs`` or, until it exists, at the folder that will hold it."""
    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    usage = shutil.disk_usage(place)
    wrong = note = None
    if not os.access(place, os.W_OK | os.X_OK):
        wrong = f"{place} is not writable; train with --run-dir somewhere else"
    elif usage.free < LEAST_DISK:
        wrong = f"{format_bytes(usage.free)} are below {format_bytes(LEAST_DISK)}: saves will fail; free some, or use --run-dir"
    elif usage.free < SCARCE_DISK:
        note = f"{format_bytes(usage.free)} fill up soon with checkpoints; lower checkpoint.keep, or use --run-dir"
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} at {place}"
    return judge("disk", found, values={"path": str(place), "free_bytes": usage.free}, wrong=wrong, note=note)


def check_shared_memory(place: Path = Path("/dev/shm")) -> Check:
    """Shared memory, through which loader processes hand over batches."""
    if not place.is_dir():
        note = f"there is no {place}; leave data.workers at 0"
        return judge("shared memory", "none", values={"total_bytes": 0, "free_bytes": 0}, note=note)
    usage = shutil.disk_usage(place)
    note = (
        f"{format_bytes(usage.free)} free are below {format_bytes(SCARCE_SHARED_MEMORY)}; leave data.workers at 0, "
        "or start the container with a larger --shm-size"
    )
    return judge(
        "shared memory",
        f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} at {place}",
        values={"total_bytes": usage.total, "free_bytes": usage.free},
        note=note if usage.free < SCARCE_SHARED_MEMORY else None,
    )


def check_open_files() -> Check:
    """How many files one process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    scarce = soft != resource.RLIM_INFINITY and soft < SCARCE_OPEN_FILES
    most = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    return judge(
        "open files",
        f"{most} per process",
        values={"soft": soft, "hard": hard},
        note=f"{soft} are below {SCARCE_OPEN_FILES}; run `ulimit -n {SCARCE_OPEN_FILES * 4}` first" if scarce else None,
    )


def cpu_quota(text: str | None) -> float | None:
    """Cores that a cgroup's ``cpu.max`` allows: ``150000 100000`` is 1.5, ``max`` is no limit."""
    parts = (text or "max").split()
    return None if parts[0] == "max" or len(parts) < 2 else int(parts[0]) / int(parts[1])


def memory_limit(text: str | None) -> int | None:
    """Bytes that a cgroup's ``memory.max`` allows, or None for no limit."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
