"""How much memory there is left, and not taking more of it than that: for processes that try what may not fit. No torch."""

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_FIRST_TO_GO = "1000"
"""proc(5), oom_score_adj: the kernel ends such a process before any other."""


def free_bytes() -> int:
    """Memory that can still be taken: by the system, or by this process's control group where that allows less."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        # "max" where there is no limit, which is no number. Version 2 of cgroups, seen from inside a container.
        limit = int((_CGROUP / "memory.max").read_text())
        free = min(free, max(0, limit - int((_CGROUP / "memory.current").read_text())))
    return free


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
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
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
