"""What the doctor checks of this machine, and what it says of each thing.

The things are versions, cores, memory, disk, shared memory and open files, as a process in this container may use them. A check
is a frozen value, so that it is decided in one file and printed in another. Versions come from package metadata: importing
torch to ask for its version would take two seconds, and may be what does not work.
"""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from shoal.core.units import format_bytes
from shoal.launch.processor import VARIABLE, WITHOUT_TILES, avoid_hidden_tiles


class State(StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    """Runs go on, but slower or with less than there could be."""
    WRONG = "wrong"
    """Something will fail, or was left behind; the check's advice says what to do."""
    FIXED = "fixed"
    """It was wrong and ``--fix`` mended it."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at: what was found and, unless that is fine, what is wrong with it and what to do."""

    name: str
    state: State
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers behind ``found``, for programs."""


def judge(name: str, found: str, *, values: dict[str, Any], wrong: str | None = None, note: str | None = None) -> Check:
    """A check whose state follows from what there is to say: wrong before note, note before ok."""
    state = State.WRONG if wrong else State.NOTE if note else State.OK
    return Check(name=name, state=state, found=found, advice=wrong or note or "", values=values)


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


LOWEST_PYTHON = (3, 11)


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """Versions of a package that must not be used, and why."""

    package: str
    why: str
    below: str | None = None
    exactly: tuple[str, ...] = ()

    def matches(self, package: str, installed: str) -> bool:
        """True when this installed version is one of them."""
        if package != self.package:
            return False
        too_old = self.below is not None and release(installed) < release(self.below)
        return too_old or installed in self.exactly


KNOWN_BAD = (
    KnownBad(
        package="torch", below="2.6", why="CVE-2025-32434: torch.load(weights_only=True) runs code; take 2.13 or newer"
    ),
    KnownBad(
        package="torch", below="2.10", why="CVE-2026-24747: a crafted weights file corrupts memory; take 2.13 or newer"
    ),
    KnownBad(
        package="lightning",
        exactly=("2.6.2", "2.6.3"),
        why="GHSA-w37p-236h-pfx3: this release stole credentials on import; remove it and change your credentials",
    ),
)


def check_python() -> Check:
    """The interpreter."""
    found = platform.python_version()
    too_old = sys.version_info < LOWEST_PYTHON
    lowest = ".".join(str(part) for part in LOWEST_PYTHON)
    return judge(
        "python",
        f"{found} ({sys.executable})",
        values={"version": found, "executable": sys.executable},
        wrong=f"{found} is below {lowest}; make the environment with a newer python3" if too_old else None,
    )


def check_packages(package: str = "shoal") -> list[Check]:
    """One check for the package itself, for each of its requirements, and for each other installed package that is known bad."""
    lowest = requirements(requires(package) or [])
    names = [package, *sorted(lowest, key=lambda name: (name != "torch", name.lower()))]
    extra = sorted({bad.package for bad in KNOWN_BAD} - set(names))
    return [check_package(name, installed_version(name), lowest.get(name)) for name in names] + [
        check
        for name in extra
        if (check := check_package(name, installed_version(name), None)).advice and installed_version(name)
    ]


def check_package(name: str, installed: str | None, lowest: str | None) -> Check:
    """Judge one package by the version that is installed; pure, so that versions nobody has here can be tested."""
    if installed is None:
        wrong = f"{name} is missing; run `make install`, or pip install '{name}{f'>={lowest}' if lowest else ''}'"
        return judge(name, "not installed", values={"version": None}, wrong=wrong)
    problems = [bad.why for bad in KNOWN_BAD if bad.matches(name, installed)]
    if lowest is not None and release(installed) < release(lowest):
        problems.append(f"{installed} is below {lowest}; pip install '{name}>={lowest}'")
    return judge(name, installed, values={"version": installed}, wrong="; ".join(problems) or None)


def installed_version(package: str) -> str | None:
    """The version that package metadata names, or None when the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements(lines: list[str]) -> dict[str, str]:
    """The lowest version of each requirement that is not an extra: ``torch>=2.13`` gives ``{"torch": "2.13"}``."""
    plain = [requirement for requirement in map(Requirement, lines) if requirement.marker is None]
    return {one.name: bound.version for one in plain for bound in one.specifier if bound.operator == ">="}


def release(text: str) -> Version:
    """A version without what follows its numbers: ``2.13.0rc1+cpu`` is 2.13. One that cannot be read is below every other."""
    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        return Version("0")
