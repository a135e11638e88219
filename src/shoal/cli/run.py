"""``shoal run``: a script's own loop on this machine's processes, or on those of several hosts, under the supervisor."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import JsonFile, Overrides, check_result_file, write_result
from shoal.cli.options.hosts import Hostfile, Hosts, Network, Python, Shell, build_fleet, check_options, read_hosts
from shoal.core.errors import RequestError

if TYPE_CHECKING:
    from shoal.launch.hosts.hostspec import HostSlots

_Script = Annotated[Path, typer.Argument(metavar="SCRIPT", help="The script, a Python file.")]
_Arguments = Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS]...", help="Arguments of the script.")]
_Plan = Annotated[
    str | None, typer.Option("--plan", metavar="TEXT", help="Lay the run out like this, such as 'dp=2 zero=1'.")
]
_Processes = Annotated[int | None, typer.Option("--nproc", metavar="N", min=1, help="Processes to start.")]
_RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Where the run leaves everything.")]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the run directory.")]
_Restarts = Annotated[
    int | None, typer.Option("--max-restarts", metavar="N", min=0, help="Restart dead ranks this many times.")
]


def run(
    context: typer.Context,
    script: _Script,
    arguments: _Arguments = None,
    plan: _Plan = None,
    nproc: _Processes = None,
    run_dir: _RunDir = None,
    resume: _Resume = False,
    max_restarts: _Restarts = None,
    overrides: Overrides = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    ssh: Shell = None,
    python: Python = None,
    network: Network = None,
    json_file: JsonFile = None,
) -> None:
    """Run SCRIPT, which uses shoal.Run or torch.distributed, on several processes under Shoal's supervisor.

    The plan reaches ``shoal.Run`` by itself. ``--set elastic.KEY=VALUE`` changes deadlines and restarts, as in a recipe.
    """
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.core.config import apply_overrides, validate
    from shoal.engine.resolve import choose_plan
    from shoal.launch.config import ProcessConfig
    from shoal.launch.environments import refuse_launcher
    from shoal.library.launch import ScriptRequest, run_script
    from shoal.trainer.claim import choose_run_dir, require_run_dir

    check_result_file(json_file)
    refuse_launcher(os.environ, "shoal run")
    if not script.is_file():
        raise RequestError(f"there is no script {script}; name a Python file")
    changes = [*(overrides or ()), *([] if max_restarts is None else [f"elastic.max_restarts={max_restarts}"])]
    for change in changes:
        if not change.startswith("elastic."):
            raise RequestError(f"--set {change}: a script has its own settings; shoal run takes those of elastic")
    tables = apply_overrides({}, changes).get("elastic", {})
    named = read_hosts(hosts, hostfile)
    check_options(named, nproc=nproc, ssh=ssh, python=python, network=network)
    chosen = choose_plan("", plan_text=plan, num_processes=sum(host.slots for host in named) or nproc)
    if chosen.ps:
        raise RequestError(f"plan {str(chosen)!r}: parameter servers run recipes (`shoal train`); use a plan with dp")
    if resume and run_dir is not None:
        require_run_dir(run_dir)
    on_hosts = _on_hosts(named, chosen.world_size, ssh, python, network) if named else {}
    where = choose_run_dir(script.stem, given=run_dir, resume=resume)
    exit_code, summary = run_script(
        ScriptRequest(
            script=script,
            arguments=tuple(arguments or ()),
            plan=chosen,
            run_dir=where,
            resume=resume,
            processes=validate(ProcessConfig, tables, origin="--set"),
            debug=context.obj["debug"],
            **on_hosts,
        )
    )
    write_result(json_file, summary)
    raise typer.Exit(exit_code)


def _on_hosts(
    hosts: "tuple[HostSlots, ...]", num_ranks: int, ssh: str | None, python: str | None, network: str | None
) -> dict[str, Any]:
    """What runs the ranks of a script on several hosts."""
    from functools import partial

    from shoal.engine.resolve import MOST_PER_CORE
    from shoal.launch.hosts.generation import supervise_hosts
    from shoal.launch.hosts.hostspec import describe_hosts, place_ranks

    placed = place_ranks(hosts, num_ranks)
    fleet = build_fleet(placed, remote=ssh, python=python, network=network, most_per_core=MOST_PER_CORE)
    return {"supervise_with": partial(supervise_hosts, fleet=fleet), "where": describe_hosts(placed)}
