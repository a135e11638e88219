"""How much memory there is left, and not taking more of it than that: for processes that try what may not fit. No torch."""

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_FIRST_TO_GO = "1000"
"""proc(5), oom_score_adj: the kernel ends such a process before any other."""


def free_bytes() -> int:
    """Memory that can still be taken: by the system, or by a control group of this process where that allows less."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(left for group in _control_groups() if (left := free_in_group(group)) is not None)])


def free_in_group(folder: Path) -> int | None:
    """What a control group (cgroups v2) lets its processes take still; None where it sets no limit."""
    try:
        # "max" where there is no limit, which is no number.
        limit, current = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    # Files that were read and are not in use: the kernel gives that memory back before it refuses any.
    cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, limit - current + cached)


def _control_groups() -> list[Path]:
    """The folders of this process's control group and of those around it."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return [_CGROUPS]
    folder = _CGROUPS / own.removeprefix("0::").strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUPS))]


@contextlib.contextmanager
def limited_growth(most_bytes: int) -> Iterator[None]:
    """Inside, an allocation that would make this process larger by more than that fails, as one that the system refuses.

    Without it Linux grants every allocation and kills a process when the memory is touched. Linux only; elsewhere nothing is
    limited.
    """
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + most_bytes
    limit = min([limit, *(known for known in before if known != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    """What counts against the limit: private memory that can be written to, touched or not."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))


def offer_to_the_kernel() -> None:
    """Should memory run out all the same, let it be this process that is killed, and not one that holds somebody's work."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
