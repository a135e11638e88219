"""``shoal calibrate``: measure this machine, so that plans can be predicted on it; or learn from runs that were measured."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, log, print_table, unwind_on_sigterm, write_result

if TYPE_CHECKING:
    from shoal.planner.hardware.machine import Machine

_File = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="The machine file; ~/.cache/shoal/machine.json when left out."),
]
_Runs = Annotated[
    list[Path] | None,
    typer.Option("--from-runs", metavar="RUN", help="Refit the file's constants to this run directory; repeatable."),
]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes and shorter times.")]


def calibrate(file: _File = None, from_runs: _Runs = None, quick: _Quick = False, json: JsonFile = None) -> None:
    """Time matrix products, copies, sharing of cores and collectives, and keep the numbers for predictions."""
    check_result_file(json)
    check_result_file(file, "the machine file")
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.launch.environments import refuse_launcher
    from shoal.planner.hardware.machine import default_path, read_machine, write_machine
    from shoal.tuning.calibration import measure_machine, refit
    from shoal.tuning.plan_choice import rehearse_plan

    refuse_launcher(os.environ, "shoal calibrate")
    unwind_on_sigterm()
    path = file or default_path()
    if from_runs:
        machine, past = refit(read_machine(path), from_runs, rehearse_plan)
        rows = [
            (run.name, f"{run.measured * 1e3:.1f}", f"{before * 1e3:.1f}", f"{after * 1e3:.1f}")
            for run, before, after in past
        ]
        print_table(("run", "measured ms", "predicted before", "after"), rows)
    else:
        machine = measure_machine(quick=quick, log=log)
    write_machine(path, machine)
    _show(machine, path)
    print(f"written to {path}")
    write_result(json, {"path": str(path), **machine.model_dump(mode="json")})


def _show(machine: "Machine", path: Path) -> None:
    from shoal.planner.hardware.machine import measurement_warnings

    origin = machine.provenance
    print(f"{origin.cpu}, {origin.cores} core(s), torch {origin.torch}; measured in {origin.seconds:.0f} s")
    for warning in measurement_warnings(machine, path):
        print(f"warning: {warning}", file=sys.stderr)
    for point in machine.sharing:
        best = max(
            2.0 * time.rows * time.inner * time.outer / time.seconds
            for time in machine.matmuls
            if time.processes == point.processes
        )
        print(
            f"{point.processes} process(es) of {point.threads} thread(s): {best / 1e9:.1f} GFLOP/s each in a matrix product, "
            f"a training step takes {point.slow_down:.2f} times as long as alone"
        )
    fit = machine.fit
    if fit.runs:
        print(
            f"fitted to {len(fit.runs)} run(s): compute x {fit.compute:.3f}, communication x {fit.communication:.3f}, "
            f"{fit.fixed_seconds * 1e3:.2f} ms a step"
        )
    times = {(time.operation, time.ranks, time.processes, time.num_bytes): time.seconds for time in machine.collectives}
    groups = sorted({key[:3] for key in times})
    sizes = sorted({key[3] for key in times})
    rows = [
        (operation, ranks, processes, *(f"{times[operation, ranks, processes, size] * 1e3:.3f}" for size in sizes))
        for operation, ranks, processes in groups
    ]
    print_table(("operation", "ranks", "processes", *(f"{size >> 10} KiB, ms" for size in sizes)), rows)
