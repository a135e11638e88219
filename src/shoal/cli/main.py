"""The ``shoal`` command: its verbs, and the boundary where an error becomes one message and an exit code.

The whole program starts here, so this file and the top of every verb import typer and the standard library only. torch takes
1.7 s to import and pydantic 0.1 s; ``shoal --help`` and a press of the Tab key have less than 0.2 s. Verbs import what they need
when they run.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NoReturn

import typer

from shoal.cli import ckpt, keys, role
from shoal.cli.calibrate import calibrate
from shoal.cli.clusters import job
from shoal.cli.dashboard import runs
from shoal.cli.dashboard.dash import dash
from shoal.cli.dashboard.export import export
from shoal.cli.dashboard.report import report
from shoal.cli.dashboard.top import top
from shoal.cli.data import group as data
from shoal.cli.doctor import doctor
from shoal.cli.init import init
from shoal.cli.models.eval import eval as evaluate
from shoal.cli.models.sample import sample
from shoal.cli.models.serve import serve
from shoal.cli.place import place
from shoal.cli.plan import plan
from shoal.cli.predict import predict
from shoal.cli.run import run
from shoal.cli.schedule import ScheduleCommand, schedule
from shoal.cli.simulate import simulate
from shoal.cli.startup import LightGroup, only_when_done, prepare_completion
from shoal.cli.train import TrainCommand, train
from shoal.cli.tune import tune
from shoal.cli.verify import verify
from shoal.core.errors import EXIT_NO, EXIT_SIGINT, EXIT_WRONG_REQUEST, ShoalError
from shoal.core.rundir import lies_in_run
from shoal.launch.processor import avoid_hidden_tiles

_PROGRAM = "shoal"

app = typer.Typer(
    name=_PROGRAM,
    cls=LightGroup,
    help="Train any PyTorch module across devices: plan the parallelism, run it, prove it equals one device.",
    no_args_is_help=True,
    # Plain help: drawing it with rich costs another 0.1 s, half of what --help may take.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("train", cls=TrainCommand)(train)
app.command("run")(run)
app.command("verify")(verify)
app.command("tune")(tune)
app.command("calibrate")(calibrate)
app.command("eval")(evaluate)
app.command("sample")(sample)
app.command("serve")(serve)
app.command("schedule", cls=ScheduleCommand)(schedule)
app.command("plan")(plan)
app.command("predict")(predict)
app.command("simulate")(simulate)
app.command("init")(init)
app.command("dash")(dash)
app.command("top")(top)
app.command("report")(report)
app.add_typer(runs.app, name="runs", cls=runs.RunsGroup)
app.command("export")(export)
app.add_typer(ckpt.app, name="ckpt", cls=LightGroup)
app.add_typer(keys.app, name="keys", cls=LightGroup)
app.add_typer(role.app, name="role", cls=LightGroup)
app.add_typer(job.app, name="job", cls=LightGroup)
app.add_typer(data.app, name="data", cls=LightGroup)
app.command("doctor")(doctor)
app.command("place")(place)


def _print_version(wanted: bool) -> None:
    if wanted:
        # Reading package metadata takes 30 ms, which only --version should pay.
        from importlib.metadata import version

        print(f"{_PROGRAM} {version(_PROGRAM)}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. May also stand after the verb.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train any PyTorch module across devices: plan the parallelism, run it, prove it equals one device."""
    context.obj = {"debug": debug}


def main() -> NoReturn:
    """Run the command line of this process and exit with the code that the contract of commands names."""
    arguments, debug = lift_debug(sys.argv[1:])
    prepare_completion()
    _open_missing_streams()
    # Of this process and of all that it starts.
    avoid_hidden_tiles(os.environ)
    try:
        _run(arguments, debug=debug)
    finally:
        _finish_stdout()


def _run(arguments: Sequence[str], *, debug: bool) -> NoReturn:
    # JSON on stdout is for a program: what people read goes to stderr.
    people = contextlib.redirect_stdout(sys.stderr) if wants_json_alone(arguments) else contextlib.nullcontext()
    try:
        with people, only_when_done():
            app(arguments, prog_name=_PROGRAM)
    except ShoalError as error:
        _fail(str(error), error.exit_code, debug=debug)
    except KeyboardInterrupt:
        sys.exit(EXIT_SIGINT)
    # The process boundary: whatever it is, the user gets one message, and the traceback on request.
    except Exception as error:
        if isinstance(error, PermissionError) and lies_in_run(error.filename):
            _fail(
                f"no permission for {error.filename}; a run directory is its owner's alone, unless its recipe sets "
                "run.readable_by: ask its owner, or use another",
                EXIT_WRONG_REQUEST,
                debug=debug,
            )
        hint = "" if debug else "\nThis was not foreseen; run again with --debug to see where it happened."
        _fail(f"{type(error).__name__}: {error}{hint}", EXIT_NO, debug=debug)
    sys.exit(0)


def _open_missing_streams() -> None:
    """Where a shell closed stdout or stderr (``>&-``), there is no stream at all, and asking whether it is a terminal fails."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _finish_stdout() -> None:
    """Write what is left, and be quiet about a reader that has gone, as ``head`` does: python would complain on its way out."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_NO)


def wants_json_alone(arguments: Sequence[str]) -> bool:
    """True when ``--json -`` is among the arguments."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return "--json=-" in arguments[:end] or ("--json", "-") in pairwise(arguments[:end])


def lift_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments with any ``--debug`` moved to the front, where the root command reads it, and whether there was one.

    What follows a bare ``--`` is data and stays as it is.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    debug = len(kept) < end
    return [*(["--debug"] if debug else []), *kept, *arguments[end:]], debug


def _fail(message: str, exit_code: int, *, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    sys.exit(exit_code)
