"""``shoal tune``: try the best predicted plans for a few real steps each, and say which is fastest."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.result import JsonFile, check_result_file, print_table, write_result
from shoal.core.errors import EXIT_SIGTERM

_Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
_Top = Annotated[int, typer.Option("--top", metavar="K", min=1, help="Plans to try.")]
_Steps = Annotated[int, typer.Option("--steps", metavar="N", min=2, help="Real steps of each.")]
_Processes = Annotated[
    int | None, typer.Option("--nproc", metavar="N", min=1, help="Processes of every plan; the cores when left out.")
]
_Machine = Annotated[
    Path | None, typer.Option("--machine", metavar="FILE", help="The machine file of `shoal calibrate`.")
]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
]


def tune(
    recipe: _Recipe,
    top: _Top = 5,
    steps: _Steps = 10,
    nproc: _Processes = None,
    machine: _Machine = None,
    overrides: _Set = None,
    json: JsonFile = None,
) -> None:
    """Try the plans that are predicted to be fastest on this machine."""
    check_result_file(json)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.trainer.config import load_recipe
    from shoal.trainer.forecasts.tuning import tune as tune_plans

    # Unwinding ends the ranks; the default action would leave their files behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_SIGTERM))
    tuned = tune_plans(
        load_recipe(recipe, tuple(overrides or ())),
        num_processes=nproc,
        top=top,
        steps=steps,
        machine=machine,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    rows = [
        (
            plan.plan,
            f"{plan.predicted_seconds * 1e3:.1f}",
            plan.problem if plan.measured_seconds is None else f"{plan.measured_seconds * 1e3:.1f}",
            "" if plan.error is None else f"{plan.error:+.1%}",
        )
        for plan in tuned.plans
    ]
    print_table(("plan", "predicted ms", "measured ms", "error"), rows)
    print(f"fastest: {tuned.plan}")
    print(f"run it:  shoal train {recipe} --plan '{tuned.plan}'")
    write_result(json, tuned)
