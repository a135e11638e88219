"""Measures this machine: starts processes as ranks are started, times them alone and together, and makes a ``Machine`` of it."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from shoal.core.errors import RequestError
from shoal.engine.resolve import default_threads
from shoal.launch.pool import Pool
from shoal.planner.hardware.calibrate import SIZES, Measured, build_machine
from shoal.planner.hardware.machine import (
    Machine,
    Provenance,
    cpu_name,
    default_path,
    doubts,
    num_cores,
    read_machine,
    torch_version,
    write_machine,
)
from shoal.telemetry.headroom import free_bytes

COUNTS = (1, 2, 4)
"""Numbers of processes that are timed."""
_SECONDS = 0.5
_QUICK_SECONDS = 0.25
_QUICK_SIZES = (4 << 10, 256 << 10, 4 << 20)
_DEADLINE = 120.0

Tell = Callable[[str], None]


def measure_machine(
    *, counts: Sequence[int] = COUNTS, quick: bool = False, threads: int | None = None, tell: Tell | None = None
) -> Machine:
    """Time matrix products, copies, sharing of cores and every collective.

    Args:
        counts: numbers of processes at once.
        quick: fewer sizes and shorter times, for a run that waits for it.
        threads: of every process; as ranks would have them when left out.
        tell: told what is being done.

    Raises:
        RunError: a process died or did not answer.
    """
    started, load, memory = time.monotonic(), os.getloadavg()[0], free_bytes()
    found = []
    for count in counts:
        own_threads = threads or default_threads(count)
        if tell is not None:
            tell(f"timing {count} process{'' if count == 1 else 'es'} with {own_threads} thread(s) each")
        found.append(_measure_group(count, own_threads, quick=quick))
    listed = ", ".join(map(str, counts))
    provenance = Provenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu=cpu_name(),
        cores=num_cores(),
        torch=torch_version(),
        seconds=time.monotonic() - started,
        load=load,
        what=f"matrix products, copies, a transformer block and channels, {listed} processes"
        + (", shortly" if quick else ""),
    )
    return build_machine(found, provenance, memory_bytes=memory)


def _measure_group(count: int, threads: int, *, quick: bool) -> Measured:
    plans = [] if count == 1 else [f"dp={count}"]
    if count % 2 == 0 and count > 2:
        # Channels of two ranks in a run of more: several work at once.
        plans.append(f"dp={count // 2} tp=2")
    with tempfile.TemporaryDirectory(prefix="shoal-calibrate-") as folder, _pool(count, threads) as pool:
        job = {
            "folder": folder,
            "threads": threads,
            "deadline_seconds": _DEADLINE,
            "seconds": _QUICK_SECONDS if quick else _SECONDS,
            "plans": plans,
            "sizes": list(_QUICK_SIZES if quick else SIZES),
        }
        return Measured(processes=count, threads=threads, answers=pool.run(job, deadline_seconds=_DEADLINE))


def _pool(count: int, threads: int) -> Pool:
    return Pool("shoal.tuning.calibration_worker", count, threads=threads, called="process")


def find_machine(
    path: Path | None, *, num_processes: int, tell: Tell, before: Callable[[], None] | None = None
) -> tuple[Machine, str]:
    """The machine to predict with, and where its numbers are from, in words.

    A file that is there is read; where there is none, or where it is another machine's, this one is timed shortly and the file
    is written.

    Args:
        path: the machine file; the user's own when left out.
        num_processes: of the runs that are to be predicted.
        tell: told why it takes a while.
        before: called before anything is timed; what it raises spares the wait.

    Raises:
        RequestError: a file that the user named is missing or wrong.
    """
    where = path or default_path()
    if path is not None or where.exists():
        try:
            machine = read_machine(where)
            for doubt in doubts(machine, where):
                tell(f"warning: {doubt}")
            return machine, f"{where}, measured {machine.provenance.date}"
        except RequestError as refusal:
            if path is not None:
                raise
            why = f"{refusal}; measuring anew"
    else:
        why = f"there is no {where}: timing this machine shortly; `shoal calibrate` does it thoroughly"
    if before is not None:
        before()
    tell(why)
    machine = measure_machine(counts=sorted({1, 2, num_processes}), quick=True)
    write_machine(where, machine)
    for doubt in doubts(machine, where):
        tell(f"warning: {doubt}")
    return machine, f"timed shortly just now, kept in {where}"
