"""``shoal job slurm|kubernetes|ray|mpi``: write the job file that runs a recipe on a cluster, and submit it where asked."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import JsonFile, Overrides, RecipeFile, check_result_file, write_result, write_whole
from shoal.core.errors import EXIT_NO, RequestError, RunError

if TYPE_CHECKING:
    from shoal.trainer.clusters.request import ClusterRun

app = typer.Typer(
    help="Write the job file that runs a recipe on a cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Nodes = Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="How many nodes.")]
_PerNode = Annotated[int, typer.Option("--per-node", metavar="M", min=1, help="Processes of each node.")]
_Plan = Annotated[str | None, typer.Option("--plan", metavar="TEXT", help="Lay the run out like this, such as 'dp=4'.")]
_RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Where the run leaves everything; all nodes see it.")
]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on where the run directory holds a run, else start one.")]
_Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the job file there, not to stdout.")]
_Submit = Annotated[bool, typer.Option("--submit", help="Submit it, too.")]
_SUBMIT_SECONDS = 120.0


@app.command()
def slurm(
    recipe: RecipeFile,
    nodes: _Nodes,
    per_node: _PerNode,
    plan: _Plan = None,
    overrides: Overrides = None,
    run_dir: _RunDir = None,
    resume: _Resume = False,
    time: Annotated[str | None, typer.Option("--time", metavar="TIME", help="As SLURM writes it: 2:00:00.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Where to run.")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="Who pays.")] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Start again after preemption or the end of its time.")
    ] = False,
    signal_seconds: Annotated[
        int, typer.Option("--signal-seconds", metavar="S", min=0, help="Save so long before the end of --time.")
    ] = 120,
    out: _Out = None,
    submit: _Submit = False,
    json_file: JsonFile = None,
) -> None:
    """A batch script for sbatch: every task of its step is a process of the run."""
    from shoal.launch.clusters.jobfiles import SlurmOptions, slurm_script
    from shoal.launch.clusters.partitions import check_room

    run = _prepare(recipe, nodes, per_node, plan, overrides, run_dir, resume, out, json_file)
    options = SlurmOptions(
        time=time, partition=partition, account=account, requeue=requeue, signal_seconds=signal_seconds
    )
    text = slurm_script(run.job, options)
    if submit:
        # A job that is submitted from inside another one has an allocation of its own.
        outside = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
        check_room(run.job, outside, partition=partition or "")
    missing = "sbatch is not here; install SLURM's commands (Debian: apt-get install slurm-client), or submit it on a login node"
    _deliver("slurm", run, text, out, json_file, submit=["sbatch"] if submit else None, missing=missing)


@app.command()
def kubernetes(
    recipe: RecipeFile,
    nodes: _Nodes,
    per_node: _PerNode,
    plan: _Plan = None,
    overrides: Overrides = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="An image that has shoal installed.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of the job; else the recipe's.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Where to run.")] = None,
    claim: Annotated[
        str | None,
        typer.Option("--claim", metavar="NAME", help="A volume claim that all pods write to, for the run directory."),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="G", min=0, help="Of each pod.")] = 0,
    resume: _Resume = False,
    out: _Out = None,
    submit: _Submit = False,
    json_file: JsonFile = None,
) -> None:
    """An indexed Job with a headless service and the recipe: a pod for each node, which starts its ranks."""
    from importlib.metadata import version

    from shoal.launch.clusters.job import name_job
    from shoal.launch.clusters.jobfiles import PodOptions, kubernetes_manifest

    if image is None:
        image = f"shoal:{version('shoal')}"
        print(f"the image is {image}; name yours with --image", file=sys.stderr)
    if claim is None:
        print(
            "warning: no --claim: the run directory is in the pod of the first rank and goes with it; with several nodes or "
            "parameter servers all pods need one folder",
            file=sys.stderr,
        )
    # The run directory is on the cluster, where this process cannot look.
    where = Path(tempfile.gettempdir()) / "shoal-pod-runs" / name_job(name or recipe.stem)
    run = _prepare(recipe, nodes, per_node, plan, overrides, where, False, out, json_file)
    more = ["--resume=auto"] if resume else []
    text = kubernetes_manifest(
        run.job,
        PodOptions(image=image, namespace=namespace, claim=claim, gpus=gpus),
        recipe_text=recipe.read_text(encoding="utf-8"),
        arguments=[*run.options, *more],
    )
    missing = "kubectl is not here; install it, or apply the file where it is: kubectl apply -f FILE"
    command = ["kubectl", "apply", "-f", "-"] if submit else None
    _deliver("kubernetes", run, text, out, json_file, submit=command, missing=missing)


@app.command()
def ray(
    recipe: RecipeFile,
    nodes: _Nodes,
    per_node: _PerNode,
    plan: _Plan = None,
    overrides: Overrides = None,
    run_dir: _RunDir = None,
    resume: _Resume = False,
    address: Annotated[
        str | None, typer.Option("--address", metavar="URL", help="Of Ray's dashboard, such as http://HOST:8265.")
    ] = None,
    out: _Out = None,
    submit: _Submit = False,
    json_file: JsonFile = None,
) -> None:
    """A script that submits the run as a job of Ray, in whose actors the ranks are."""
    from shoal.launch.clusters.jobfiles import ray_script

    run = _prepare(recipe, nodes, per_node, plan, overrides, run_dir, resume, out, json_file)
    text = ray_script(run.job, address=address)
    missing = "ray is not here; run `pip install 'shoal[ray]' 'ray[default]'`, or start the script where it is"
    _deliver("ray", run, text, out, json_file, submit=["sh"] if submit else None, missing=missing, needs="ray")


@app.command()
def mpi(
    recipe: RecipeFile,
    nodes: _Nodes,
    per_node: _PerNode,
    plan: _Plan = None,
    overrides: Overrides = None,
    run_dir: _RunDir = None,
    resume: _Resume = False,
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="A:M,B:M", help="The nodes, that of the first rank first.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--mpi", metavar="openmpi|mpich", help="Whose mpirun; else the one that is here.")
    ] = None,
    out: _Out = None,
    submit: _Submit = False,
    json_file: JsonFile = None,
) -> None:
    """A script with the mpirun that starts the run."""
    from shoal.launch.clusters.job import check_slots, read_slots
    from shoal.launch.clusters.jobfiles import mpi_script
    from shoal.launch.clusters.mpi import MISSING, which_mpi

    run = _prepare(recipe, nodes, per_node, plan, overrides, run_dir, resume, out, json_file)
    slots = read_slots(hosts, per_node=per_node) if hosts is not None else []
    if slots:
        check_slots(slots, run.job.num_processes)
    elif nodes > 1:
        raise RequestError(
            f"--nodes {nodes}: MPI does not tell its processes where the first one is; name the hosts: "
            f"--hosts a:{per_node},b:{per_node}"
        )
    if kind not in (None, "openmpi", "mpich"):
        raise RequestError(f"--mpi {kind}: the choices are openmpi and mpich")
    found = which_mpi() if kind is None else kind
    text = mpi_script(run.job, "mpich" if found == "mpich" else "openmpi", slots=slots)
    _deliver("mpi", run, text, out, json_file, submit=["sh"] if submit else None, missing=MISSING, needs="mpirun")


def _prepare(
    recipe: Path,
    nodes: int,
    per_node: int,
    plan: str | None,
    overrides: list[str] | None,
    run_dir: Path | None,
    resume: bool,
    out: Path | None,
    json_file: Path | None,
) -> "ClusterRun":
    # Verbs import what they need when they run: see cli/main.py.
    from shoal.trainer.clusters.request import prepare_cluster_run
    from shoal.trainer.request import TrainRequest

    check_result_file(json_file)
    check_result_file(out, "--out")
    request = TrainRequest(
        recipe=recipe, plan=plan, overrides=tuple(overrides or ()), run_dir=run_dir, resume=resume, may_start=resume
    )
    return prepare_cluster_run(request, nodes=nodes, per_node=per_node)


def _deliver(
    launcher: str,
    run: "ClusterRun",
    text: str,
    out: Path | None,
    json_file: Path | None,
    *,
    submit: list[str] | None,
    missing: str,
    needs: str | None = None,
) -> None:
    """Write the job file where it was asked for, and submit it."""
    if submit is not None and shutil.which(needs or submit[0]) is None:
        raise RequestError(f"--submit: {missing}")
    if out is not None:
        write_whole(out, text, "--out")
        print(
            f"{out}: {launcher}, {run.job.nodes} node(s) of {run.job.per_node} process(es), {run.plan}", file=sys.stderr
        )
    elif submit is None:
        print(text, end="")
    result = {
        "launcher": launcher,
        "file": out,
        "text": text,
        "plan": str(run.plan),
        "nodes": run.job.nodes,
        "per_node": run.job.per_node,
        "run_dir": run.run_dir,
        "submitted": None,
    }
    if submit is not None:
        result["submitted"] = _submit(submit, text)
    write_result(json_file, result)


def _submit(command: list[str], text: str) -> str:
    """Hand the job file to its program; what that one says.

    Raises:
        RunError: it refused.
    """
    # A script of mpirun, or one that waits for Ray, is the run itself and lasts as long.
    seconds = None if command[0] == "sh" else _SUBMIT_SECONDS
    try:
        ended = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]} did not answer within {_SUBMIT_SECONDS:g} s") from error
    print(ended.stdout, end="")
    if ended.returncode != 0:
        if command[0] == "sh":
            raise typer.Exit(ended.returncode if ended.returncode > 0 else EXIT_NO)
        raise RunError(f"{' '.join(command)} refused the job, with exit code {ended.returncode}")
    return ended.stdout.strip()
