"""``shoal top``: a run in the terminal, as it goes."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, unwind_on_sigterm, write_result

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, of a run under way or over.")]
_Once = Annotated[bool, typer.Option("--once", help="Show it once and exit.")]
_Every = Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Look again after so long.")]


def top(run: _Run, once: _Once = False, every: _Every = 1.0, json_file: JsonFile = None) -> None:
    """Show where every rank of RUN is, how fast it goes, what it waits for and what has happened, until it is over."""
    # Verbs import what they need when they run: see cli/main.py.
    check_result_file(json_file)
    unwind_on_sigterm()
    from shoal.dashboard.terminal.looking import Looker
    from shoal.dashboard.terminal.top import watch

    looker = Looker(run)
    try:
        watch(looker.take, every=every, once=once)
    finally:
        # Also of what was on the screen when somebody had seen enough.
        if looker.last is not None:
            write_result(json_file, looker.last.as_dict())
