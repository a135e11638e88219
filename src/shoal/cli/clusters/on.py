"""``shoal train --on slurm|mpi|ray``, and ``--per-node`` in a pod: a recipe's run that a cluster's own launcher starts.

What ``cli/train.py`` needs for it, in a file of its own.
"""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shoal.cli.console import write_result
from shoal.core.errors import RequestError

if TYPE_CHECKING:
    from shoal.core.place import Place
    from shoal.trainer.request import TrainRequest


class Launcher(StrEnum):
    """Who starts the processes."""

    slurm = "slurm"
    mpi = "mpi"
    ray = "ray"


On = Annotated[Launcher | None, typer.Option("--on", help="Let this launcher start the ranks on its nodes, and stay.")]
Nodes = Annotated[int | None, typer.Option("--nodes", metavar="N", min=1, help="With --on: how many nodes.")]
PerNode = Annotated[
    int | None,
    typer.Option(
        "--per-node", metavar="M", min=1, help="With --on: processes of each node. In a pod: the ranks to start there."
    ),
]


def start_elsewhere(
    request: "TrainRequest",
    on: Launcher | None,
    *,
    nodes: int | None,
    per_node: int | None,
    hosts: str | None,
    json_file: Path | None,
    is_odd: bool,
) -> None:
    """Let a cluster's launcher start the run, or start the ranks of this node of one; returns where neither was asked for.

    Args:
        request: what to train.
        on: the launcher.
        nodes: see ``prepare_cluster_run``.
        per_node: see there.
        hosts: of MPI.
        json_file: for the result.
        is_odd: an option was given that is for this machine alone.
    """
    if on is None and nodes is None and per_node is None:
        return
    if is_odd:
        raise RequestError(
            "--on, --nodes and --per-node start the run elsewhere; leave out --nproc, --dry-run, --forecast and --find-rate"
        )
    if on is None and nodes is not None:
        raise RequestError(
            f"--nodes {nodes} needs --on slurm, --on mpi or --on ray, which know the nodes; or use `shoal job`"
        )
    if on is not None:
        _start_on(on, request, nodes=nodes, per_node=per_node, hosts=hosts, json_file=json_file)
    assert per_node is not None
    if "LOCAL_RANK" not in os.environ:
        _start_local_ranks(request, per_node, json_file)


def be_launched(request: "TrainRequest", place: "Place", json_file: Path | None) -> NoReturn:
    """Be one process of a run that a launcher started: a rank, or a role where the plan has parameter servers."""
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.serverrun.launched import asks_servers, check_servers, train_as_role
    from shoal.trainer.launched import train_launched

    has_servers = asks_servers(request)
    check_servers(place, has_servers=has_servers)
    exit_code, summary = train_as_role(request, place) if has_servers else train_launched(request)
    if place.rank == 0:
        write_result(json_file, summary)
    raise typer.Exit(exit_code)


def _start_on(
    launcher: Launcher,
    request: "TrainRequest",
    *,
    nodes: int | None,
    per_node: int | None,
    hosts: str | None,
    json_file: Path | None,
) -> NoReturn:
    """Start the run by a launcher, stay with it, and exit as it did."""
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.launch.clusters.job import read_slots
    from shoal.launch.clusters.slurm import nodes_of_allocation
    from shoal.trainer.clusters.request import prepare_cluster_run
    from shoal.trainer.clusters.run import check_launcher, train_on

    if hosts is not None and launcher != Launcher.mpi:
        raise RequestError(
            f"--hosts with --on {launcher}: {launcher} knows its own hosts; leave --hosts out, or use --on mpi"
        )
    if launcher == Launcher.slurm and nodes is None:
        nodes = nodes_of_allocation(os.environ)
    if hosts is not None and nodes is None and per_node is None:
        # Hosts may differ in how many processes they take: their sum is held to the plan's later.
        counts = {one.count for one in read_slots(hosts, per_node=None)}
        per_node = counts.pop() if len(counts) == 1 else None
        nodes = len(read_slots(hosts, per_node=None)) if per_node is not None else None
    run = prepare_cluster_run(request, nodes=nodes, per_node=per_node)
    check_launcher(launcher.value)
    exit_code, summary = train_on(run, launcher.value, hosts=hosts)
    write_result(json_file, summary)
    raise typer.Exit(exit_code)


def _start_local_ranks(request: "TrainRequest", per_node: int, json_file: Path | None) -> NoReturn:
    """Be the process of a node that starts its ranks; each of them is told its number on the node."""
    from shoal.launch.clusters.localranks import check_node, run_local_ranks
    from shoal.trainer.config import load_recipe
    from shoal.trainer.elastic.limits import refuse_elastic_launched

    check_node(os.environ, per_node)
    recipe = load_recipe(request.recipe, request.overrides)
    refuse_elastic_launched(recipe)
    grace = recipe.elastic.stop_grace
    arguments = ["train", str(request.recipe)]
    if request.plan is not None:
        arguments += ["--plan", request.plan]
    for change in request.overrides:
        arguments += ["--set", change]
    if request.run_dir is not None:
        arguments += ["--run-dir", str(request.run_dir)]
    if request.resume:
        arguments.append("--resume=auto" if request.may_start else "--resume")
    if json_file is not None:
        arguments += ["--json", str(json_file)]
    raise typer.Exit(run_local_ranks(arguments, per_node, stop_grace=grace))
