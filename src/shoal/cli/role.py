"""``shoal role``: one process of a run with parameter servers on several machines, started by itself with one command and a key.

Every process is given the same recipe, plan and list of centers; what differs is which role it has and where it listens.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli.console import JsonFile, Overrides, check_result_file, write_result

if TYPE_CHECKING:
    from shoal.serverrun.standalone import PreparedRole

app = typer.Typer(
    help="Be one process of a run with parameter servers on several machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file; the same for every process.")]
_Centers = Annotated[
    str,
    typer.Option(
        "--centers",
        metavar="ADDRESS[#KEY],...",
        help="One candidate for the center, or three and more; the same list for every process.",
    ),
]
_Plan = Annotated[
    str | None,
    typer.Option("--plan", metavar="TEXT", help="Lay the run out like this, such as 'ps=2 workers=4 backup=1'."),
]
_Listen = Annotated[
    str, typer.Option("--listen", metavar="ADDRESS", help="Where the others reach this process: tcp://HOST:PORT.")
]
_Index = Annotated[int, typer.Option("--index", metavar="N", min=0, help="Which of its like this one is, from 0.")]
_Keys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="The key of this process (`shoal keys new FILE`); tcp needs one."),
]
_Allow = Annotated[
    Path | None,
    typer.Option(
        "--allow", metavar="PATH", help="Public keys that are let in: a file, or a folder of *.pub; else its own alone."
    ),
]
_Etcd = Annotated[
    str,
    typer.Option("--etcd", metavar="URL/KEY", help="Elect by this etcd (https://HOST:2379/KEY), a KEY for each run."),
]
_RunDir = Annotated[
    Path,
    typer.Option("--run-dir", metavar="DIR", help="Where the run leaves everything; one folder, seen by all servers."),
]
_VoteDir = Annotated[
    Path,
    typer.Option("--run-dir", metavar="DIR", help="Where this candidate keeps its vote; it must survive the machine."),
]
_Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest whole checkpoint; needed too to start a server again.")
]
_Supervised = Annotated[
    bool, typer.Option("--supervised", hidden=True, help="Whoever started this role holds the run directory.")
]
_Restarts = Annotated[
    int,
    typer.Option(
        "--restarts", metavar="N", min=0, help="Start this process again after it failed or was killed, so often."
    ),
]
_Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; the summary will say so.")]


@app.command()
def center(
    recipe: _Recipe,
    centers: _Centers,
    listen: _Listen,
    run_dir: _VoteDir,
    plan: _Plan = None,
    overrides: Overrides = None,
    keys: _Keys = None,
    allow: _Allow = None,
    etcd: _Etcd = "",
    restarts: _Restarts = 0,
) -> None:
    """Stand for the center: one leads, the others take over when it dies."""
    _start_again("center", restarts)
    from shoal.serverrun.center import lead
    from shoal.serverrun.standalone import run_async

    role = _prepare(
        "center",
        recipe,
        centers=centers,
        listen=listen,
        run_dir=run_dir,
        plan=plan,
        overrides=overrides,
        keys=keys,
        allow=allow,
        etcd=etcd,
    )
    raise typer.Exit(run_async(lambda: lead(role.spec)))


@app.command()
def server(
    recipe: _Recipe,
    centers: _Centers,
    index: _Index,
    listen: _Listen,
    run_dir: _RunDir,
    plan: _Plan = None,
    overrides: Overrides = None,
    keys: _Keys = None,
    allow: _Allow = None,
    resume: _Resume = False,
    supervised: _Supervised = False,
    restarts: _Restarts = 0,
    json_file: JsonFile = None,
) -> None:
    """Hold a part of the weights; the server that leads the log in the end writes the summary."""
    _start_again("server", restarts)
    check_result_file(json_file)
    role = _prepare(
        "server",
        recipe,
        centers=centers,
        index=index,
        listen=listen,
        run_dir=run_dir,
        plan=plan,
        overrides=overrides,
        keys=keys,
        allow=allow,
        resume=resume,
        is_held=supervised,
    )
    _keep_threads_quiet()
    from shoal.serverrun.server.process import run_server

    assert role.prepared is not None
    code, summary = run_server(role.spec, role.prepared)
    if summary is not None:
        write_result(json_file, summary)
    raise typer.Exit(code)


@app.command()
def worker(
    recipe: _Recipe,
    centers: _Centers,
    index: _Index,
    plan: _Plan = None,
    overrides: Overrides = None,
    keys: _Keys = None,
    restarts: _Restarts = 0,
) -> None:
    """Compute gradients until there is nothing left to do; may join and leave at any time."""
    _start_again("worker", restarts)
    role = _prepare("worker", recipe, centers=centers, index=index, plan=plan, overrides=overrides, keys=keys)
    _keep_threads_quiet()
    from shoal.serverrun.standalone import run_blocking
    from shoal.serverrun.worker.process import work

    raise typer.Exit(run_blocking(lambda: work(role.spec)))


@app.command()
def stop(
    centers: _Centers, keys: _Keys = None, reason: _Reason = "shoal role stop", json_file: JsonFile = None
) -> None:
    """End a run in order, with a checkpoint: every role ends after what is under way."""
    import asyncio

    from shoal.serverrun.cluster import read_cluster
    from shoal.serverrun.standalone import stop_run

    check_result_file(json_file)
    found = asyncio.run(stop_run(read_cluster(centers=centers, keys=keys), reason=reason, seconds=10.0))
    print(f"{found.name} of epoch {found.epoch} was told to stop the run")
    write_result(json_file, {"center": found.name, "epoch": found.epoch})


def _start_again(role: str, restarts: int) -> None:
    """With restarts, be the one that watches the process; without, be it, with the time in front of its lines in a log."""
    if not sys.stderr.isatty():
        from shoal.telemetry.stamped import StampedStream

        sys.stderr = StampedStream(sys.stderr)
    if not restarts:
        return
    from shoal.serverrun.again import run_again

    words = _without_restarts(sys.argv[1:])
    first = [sys.executable, "-m", "shoal", *words]
    # A server that comes back finds the run that it left.
    later = [*first, "--resume"] if role == "server" and "--resume" not in words else first

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    raise typer.Exit(run_again(first, later, name=f"this {role}", restarts=restarts, tell=tell))


def _without_restarts(words: list[str]) -> list[str]:
    """A command line without its ``--restarts N``."""
    kept, skips = [], False
    for word in words:
        if skips or word == "--restarts" or word.startswith("--restarts="):
            skips = word == "--restarts"
            continue
        kept.append(word)
    return kept


def _prepare(
    role: Literal["center", "server", "worker"], recipe: Path, *, overrides: list[str] | None, **options: Any
) -> "PreparedRole":
    """The role of this process, checked; ``options`` are those of ``RoleRequest``."""
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.cli.train import OwnParts
    from shoal.serverrun.standalone import RoleRequest, prepare_role

    request = RoleRequest(role=role, recipe=recipe, overrides=tuple(overrides or ()), **options)
    prepared = prepare_role(request, own=OwnParts())
    print(f"shoal: {prepared.spec.name} of {prepared.spec.plan}", file=sys.stderr)
    if role == "server" and prepared.prepared is not None:
        for warning in prepared.prepared.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return prepared


def _keep_threads_quiet() -> None:
    """Threads that spin while they wait make a step thirty times slower when anything else wants the core; read by torch."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
