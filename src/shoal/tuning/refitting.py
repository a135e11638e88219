"""Refits a machine's constants to runs that were measured: what was predicted of each is worked out again and compared. No torch.

The time of a run's step is the median over its events of the first rank, without the first steps and without waiting for data.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from shoal.core.config import read_toml, validate
from shoal.core.errors import RequestError
from shoal.core.rundir import RunDir
from shoal.planner.hardware.calibrate import PastRun, fit_runs
from shoal.planner.hardware.machine import Fit, Machine, write_machine
from shoal.telemetry.lines import decode_events
from shoal.trainer.claim import read_plan
from shoal.trainer.config import Recipe
from shoal.tuning.plan_choice import decide

_FEWEST = 5
_WARM = 2


def refit(machine: Machine, path: Path, runs: Sequence[Path]) -> tuple[Machine, list[tuple[PastRun, float, float]]]:
    """The machine with constants fitted to runs, and each run with its prediction before and after.

    Args:
        machine: as it was read.
        path: where it lies; predictions without any fit are made beside it.
        runs: run directories of this machine.

    Raises:
        RequestError: a directory holds no run, or too few steps.
    """
    bare = machine.model_copy(update={"fit": Fit()})
    beside = path.with_name(f".{path.name}.unfitted")
    write_machine(beside, bare)
    try:
        past = [_past_run(run, beside) for run in runs]
    finally:
        beside.unlink(missing_ok=True)
    fit = fit_runs(past)
    before = machine.fit
    told = [(run, _predict(run, before), _predict(run, fit)) for run in past]
    return machine.model_copy(update={"fit": fit}), told


def _predict(run: PastRun, fit: Fit) -> float:
    return run.compute * fit.compute + run.communication * fit.communication + fit.fixed_seconds


def _past_run(run_dir: Path, machine: Path) -> PastRun:
    measured = step_seconds(run_dir)
    run = RunDir(run_dir)
    recipe = validate(Recipe, read_toml(run.recipe), origin=str(run.recipe))
    plan = read_plan(run_dir)
    decision = decide(recipe, None, machine=machine, plans=[plan])
    (page,) = decision.ranked
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
