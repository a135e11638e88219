"""Calibration: this machine's constants, measured by processes as ranks are started, or refitted to runs that were measured."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.core.config import read_toml, validate
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.engine.resolve import default_threads
from shoal.launch.pool import Pool
from shoal.planner.hardware.calibrate import SIZES, Measured, PastRun, build_machine, fit_runs
from shoal.planner.hardware.machine import (
    Fit,
    Machine,
    Provenance,
    cpu_name,
    default_path,
    measurement_warnings,
    num_cores,
    read_machine,
    torch_version,
    write_machine,
)
from shoal.telemetry.eventlog import decode_events
from shoal.telemetry.memory import free_bytes
from shoal.trainer.claim import read_plan
from shoal.trainer.config import Recipe

COUNTS = (1, 2, 4)
"""Numbers of processes that are timed."""
_SECONDS = 0.5
_QUICK_SECONDS = 0.25
_QUICK_SIZES = (4 << 10, 256 << 10, 4 << 20)
_DEADLINE = 120.0
_FEWEST = 5
_WARM = 2

Log = Callable[[str], None]


def measure_machine(
    *, counts: Sequence[int] = COUNTS, quick: bool = False, threads: int | None = None, log: Log | None = None
) -> Machine:
    """Time matrix products, copies, sharing of cores and every collective.

    Args:
        counts: numbers of processes at once.
        quick: fewer sizes and shorter times, for a run that waits for it.
        threads: of every process; as ranks would have them when left out.
        log: given a line about what is being done.

    Raises:
        RunError: a process died or did not answer.
    """
    started, load, memory = time.monotonic(), os.getloadavg()[0], free_bytes()
    found = []
    for count in counts:
        own_threads = threads or default_threads(count)
        if log is not None:
            log(f"timing {count} process{'' if count == 1 else 'es'} with {own_threads} thread(s) each")
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
    path: Path | None, *, num_processes: int, log: Log, before: Callable[[], None] | None = None
) -> tuple[Machine, str]:
    """The machine to predict with, and where its numbers are from, in words.

    A file that is there is read; where there is none, or where it is another machine's, this one is timed shortly and the file
    is written.

    Args:
        path: the machine file; the user's own when left out.
        num_processes: of the runs that are to be predicted.
        log: given a line about why it takes a while.
        before: called before anything is timed; what it raises spares the wait.

    Raises:
        RequestError: a file that the user named is missing or wrong.
    """
    where = path or default_path()
    if path is not None or where.exists():
        try:
            machine = read_machine(where)
            for warning in measurement_warnings(machine, where):
                log(f"warning: {warning}")
            return machine, f"{where}, measured {machine.provenance.date}"
        except RequestError as refusal:
            if path is not None:
                raise
            why = f"{refusal}; measuring anew"
    else:
        why = f"there is no {where}: timing this machine shortly; `shoal calibrate` does it thoroughly"
    if before is not None:
        before()
    log(why)
    machine = measure_machine(counts=sorted({1, 2, num_processes}), quick=True)
    write_machine(where, machine)
    for warning in measurement_warnings(machine, where):
        log(f"warning: {warning}")
    return machine, f"timed shortly just now, kept in {where}"


def refit(
    machine: Machine, runs: Sequence[Path], predict: Callable[[Recipe, Plan, Machine], Mapping[str, Any]]
) -> tuple[Machine, list[tuple[PastRun, float, float]]]:
    """The machine with constants fitted to runs, and each run with its prediction before and after.

    The time of a run's step is the median over its events of the first rank, without the first steps and without waiting for
    data.

    Args:
        machine: as it was read.
        runs: run directories of this machine.
        predict: works out the step of a plan on a machine anew; here without any fit.

    Raises:
        RequestError: a directory holds no run, or too few steps.
    """
    bare = machine.model_copy(update={"fit": Fit()})
    past = [_past_run(run, lambda recipe, plan: predict(recipe, plan, bare)) for run in runs]
    fit = fit_runs(past)
    before = machine.fit
    fitted = [(run, _predict(run, before), _predict(run, fit)) for run in past]
    return machine.model_copy(update={"fit": fit}), fitted


def _predict(run: PastRun, fit: Fit) -> float:
    return run.compute * fit.compute + run.communication * fit.communication + fit.fixed_seconds


def _past_run(run_dir: Path, predict: Callable[[Recipe, Plan], Mapping[str, Any]]) -> PastRun:
    measured = step_seconds(run_dir)
    run = RunDir(run_dir)
    recipe = validate(Recipe, read_toml(run.recipe), origin=str(run.recipe))
    page = predict(recipe, Plan.parse(read_plan(run_dir)))
    moved = sum(page["communication_seconds"].values())
    # With a pipeline what is computed and waited for is one number: the schedule has put both together.
    return PastRun(
        name=str(run_dir), compute=max(1e-9, page["seconds"] - moved), communication=moved, measured=measured
    )


def step_seconds(run_dir: Path) -> float:
    """The median step of a run, from the events of its first rank.

    Raises:
        RequestError: this is no run directory, or it has fewer steps than it takes.
    """
    path = RunDir(run_dir).events(0)
    if not path.exists():
        raise RequestError(f"{run_dir} is not a run directory with events: there is no {path}")
    seconds = [
        float(event["seconds"]) - float(event["data_seconds"])
        for event in decode_events(path.read_bytes().splitlines())
        if event.get("kind") == "step" and not event.get("skipped")
    ]
    if len(seconds) < _FEWEST + _WARM:
        raise RequestError(f"{run_dir} has {len(seconds)} steps, and {_FEWEST + _WARM} are the fewest to fit to")
    return statistics.median(seconds[_WARM:])
