"""``shoal doctor``: what this machine offers a run, what dead runs left behind, and what is wrong with either."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, print_table, write_result
from shoal.cli.options.hosts import Hostfile, Network, Python, Shell, build_fleet, read_hosts
from shoal.core.errors import EXIT_NO, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.doctor.checks import Check


def doctor(
    runs: Annotated[
        Path | None,
        typer.Argument(metavar="RUNS", help="Look for leftovers of these runs only; by default runs/ and the machine."),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove what dead runs of yours left behind; look without it first.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not ask torch for its backends, which takes seconds.")
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="A,B", help="Check these hosts and the way between every two of them."),
    ] = None,
    hostfile: Hostfile = None,
    ssh: Shell = None,
    python: Python = None,
    network: Network = None,
    json: JsonFile = None,
) -> None:
    """Look at versions, machine, network and leftovers of dead runs; exit 1 if something is wrong and was not fixed."""
    # psutil and the checks load when asked for: `shoal --help` has no time for them.
    from shoal.checkpoint.commit import is_leftover, sweep
    from shoal.doctor.leftovers import Saves
    from shoal.doctor.report import examine, examine_leftovers

    if runs is not None and not runs.is_dir():
        raise RequestError(f"there is no folder {runs}; give the folder that holds the runs")
    check_result_file(json)
    if named := read_hosts(hosts, hostfile):
        from shoal.doctor.hosts import examine_hosts

        _tell(examine_hosts(build_fleet(named, remote=ssh, python=python, network=network)), json)
        return
    place = Path("runs") if runs is None else runs
    saves = Saves(is_leftover=is_leftover, sweep=sweep)
    checks = [*examine(place, quick=quick), *examine_leftovers(place, saves, fix=fix, whole_machine=runs is None)]
    _tell(checks, json)


def _tell(checks: "Sequence[Check]", json: Path | None) -> None:
    from shoal.doctor.checks import State

    print_table(
        ("check", "state", "found", "what to do"),
        [(check.name, check.state, check.found, check.advice) for check in checks],
    )
    num_wrong = sum(check.state is State.WRONG for check in checks)
    num_fixed = sum(check.state is State.FIXED for check in checks)
    print(f"{num_wrong} wrong, {num_fixed} fixed, {len(checks)} checked")
    write_result(json, {"ok": num_wrong == 0, "wrong": num_wrong, "fixed": num_fixed, "checks": checks})
    if num_wrong:
        raise typer.Exit(EXIT_NO)
