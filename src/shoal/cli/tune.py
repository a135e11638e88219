"""``shoal tune``: try the best predicted plans for a few real steps each, say which is fastest, and keep it in a recipe."""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import (
    STDOUT,
    JsonFile,
    Overrides,
    RecipeFile,
    check_result_file,
    log,
    print_table,
    unwind_on_sigterm,
    write_result,
    write_whole,
)
from shoal.core.errors import RequestError, RunError

_Top = Annotated[int, typer.Option("--top", metavar="K", min=1, help="Plans to try.")]
_Steps = Annotated[int, typer.Option("--steps", metavar="N", min=2, help="Real steps of each.")]
_Processes = Annotated[
    int | None, typer.Option("--nproc", metavar="N", min=1, help="Processes of every plan; the cores when left out.")
]
_Machine = Annotated[
    Path | None, typer.Option("--machine", metavar="FILE", help="The machine file of `shoal calibrate`.")
]
_Write = Annotated[
    Path | None,
    typer.Option(
        "--write", metavar="FILE", help="Write the recipe with the fastest plan there; RECIPE itself may be named."
    ),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Let --write replace a file that is there.")]


def tune(
    recipe: RecipeFile,
    top: _Top = 5,
    steps: _Steps = 10,
    nproc: _Processes = None,
    machine: _Machine = None,
    write: _Write = None,
    overwrite: _Overwrite = False,
    overrides: Overrides = None,
    json: JsonFile = None,
) -> None:
    """Try the plans that are predicted to be fastest on this machine, and keep the fastest."""
    check_result_file(json)
    _check_target(write, recipe, overwrite=overwrite)
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.cli.train import try_before_search
    from shoal.launch.environments import refuse_launcher
    from shoal.trainer.config import load_recipe
    from shoal.tuning.tune import tune as tune_plans

    refuse_launcher(os.environ, "shoal tune")
    try_before_search(recipe, tuple(overrides or ()))
    unwind_on_sigterm()
    tuned = tune_plans(
        load_recipe(recipe, tuple(overrides or ())),
        num_processes=nproc,
        top=top,
        steps=steps,
        machine=machine,
        log=log,
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
    # Before the recipe: what took minutes to find is not lost where that cannot be written.
    write_result(json, {**dataclasses.asdict(tuned), "written": write})
    if write is not None:
        keep_plan(recipe, tuned.plan, write)
        print(f"kept in: {write}")
    print(f"run it:  {train_command(recipe, tuned.plan, overrides or (), written=write)}")


def _check_target(path: Path | None, recipe: Path, *, overwrite: bool) -> None:
    """Refuse a file that could not be written, or that nobody said may be replaced, before plans are tried for minutes.

    Raises:
        RequestError: it is stdout or a folder, closed to us, or there and not the recipe; or nothing is to be written.
    """
    if path is None:
        if overwrite:
            raise RequestError("--overwrite is about the file of --write, and there is none; give --write FILE")
        return
    if path == STDOUT:
        raise RequestError("--write - would mix the recipe with the table; name a file")
    check_result_file(path, "--write")
    if path.exists() and not overwrite and not (recipe.exists() and path.samefile(recipe)):
        raise RequestError(
            f"--write {path}: there is such a file, and it is not the recipe {recipe}; name another, or give --overwrite"
        )


def keep_plan(recipe: Path, plan: str, path: Path) -> None:
    """Write a recipe with a plan into a file, which may be the recipe itself.

    Raises:
        RunError: the recipe can no longer be read, or the disk refused.
    """
    from shoal.trainer.config import with_plan

    # Read now and not before the trials: who edits the recipe meanwhile keeps the edit.
    try:
        text = with_plan(recipe.read_bytes().decode(), plan)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{recipe} can no longer be read, so {path} is not written: {error}; set plan = {plan!r} there by hand"
        ) from error
    # What a link leads to is replaced in one piece, and the link stays.
    write_whole(path.resolve() if path.is_symlink() else path, text, "--write")


def train_command(recipe: Path, plan: str, overrides: Sequence[str], *, written: Path | None) -> str:
    """The command that trains by the plan that was found, with what the trials were told to change."""
    words = ["shoal", "train", str(recipe), "--plan", plan] if written is None else ["shoal", "train", str(written)]
    # A plan that the trials were told to leave would stand in the way of the one that they found.
    changes = [change for change in overrides if change.partition("=")[0].strip() != "plan"]
    return shlex.join([*words, *(word for change in changes for word in ("--set", change))])
