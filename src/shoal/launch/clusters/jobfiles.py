"""Job files: the text by which SLURM, Kubernetes, Ray or MPI runs a recipe as ``shoal train`` would. Pure.

Every file starts the same command. Where the launcher tells its processes who they are, nothing is written about that; where it
does not (Kubernetes), the file has the size of the run and the address of its first pod.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.launch.clusters.job import MASTER_PORT, Job, Slots
from shoal.launch.clusters.mpi import MpiKind, mpirun_command
from shoal.launch.clusters.slurm import step_options
from shoal.launch.clusters.yamltext import write_yaml

_LABEL = "app.kubernetes.io/instance"
_RECIPE_FOLDER, _RUN_FOLDER = "/shoal/recipe", "/shoal/runs"


_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}", re.ASCII)
"""As SLURM writes how long a job may take."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a batch script asks SLURM for, besides nodes and tasks."""

    time: str | None = None
    """As SLURM writes it: minutes, ``hours:minutes:seconds`` or ``days-hours``."""
    partition: str | None = None
    account: str | None = None
    signal_seconds: int = 120
    """Seconds before the end of its time at which the run is asked to save; 0 for no such signal."""
    requeue: bool = False
    """Whether the job may start again: after a node's death, preemption, or the end of its time."""


def slurm_script(job: Job, options: SlurmOptions | None = None) -> str:
    """A script for ``sbatch``: every task of its step is a process of the run."""
    options = options or SlurmOptions()
    if options.time is not None and not _TIME.fullmatch(options.time):
        raise RequestError(
            f"--time {options.time}: SLURM reads minutes, minutes:seconds, hours:minutes:seconds, days-hours and "
            "days-hours:minutes; write 2:00:00"
        )
    asked: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks": str(job.num_processes),
        "ntasks-per-node": str(job.per_node),
        "chdir": str(job.folder),
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "signal": f"TERM@{options.signal_seconds}" if options.signal_seconds and options.time else None,
    }
    lines = [
        "#!/bin/bash",
        "# Written by `shoal job slurm`; submit it with `sbatch FILE`. Every task is a process of the run.",
    ]
    lines += [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]
    lines += [f"#SBATCH --{'requeue' if options.requeue else 'no-requeue'}", "", *_exports(job.environment)]
    step = ["srun", *step_options(job), *job.command]
    if not options.requeue:
        return _text([*lines, f"exec {shlex.join(step)}"])
    # A run that was asked to stop has saved and says 143; started again, it goes on. A single task is no rank of SLURM to it, and
    # would not see by itself that it was started before.
    if not any(word.startswith("--resume") for word in step):
        step.append("--resume=auto")
    return _text(
        [
            *lines,
            shlex.join(step),
            "code=$?",
            'if [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$code"',
        ]
    )


def mpi_script(job: Job, kind: MpiKind, *, slots: Sequence[Slots] = (), is_root: bool | None = None) -> str:
    """A script that runs ``mpirun``."""
    command = mpirun_command(job, kind, slots=slots, is_root=is_root)
    return _text(
        [
            "#!/bin/sh",
            "# Written by `shoal job mpi`; start it with `sh FILE`. Every process of MPI is a process of the run.",
            f"cd {shlex.quote(str(job.folder))} || exit 2",
            f"exec {shlex.join(command)}",
        ]
    )


def ray_script(job: Job, *, address: str | None = None) -> str:
    """A script that submits a job to Ray, whose entry point asks the cluster for actors and starts the ranks in them."""
    submit = ["ray", "job", "submit", *(["--address", address] if address else [])]
    placed = ["--on", "ray", "--nodes", str(job.nodes), "--per-node", str(job.per_node)]
    # The entry point runs on a node of the cluster, under a shell of Ray's in a folder of Ray's.
    variables = [f"{name}={value}" for name, value in job.environment.items()]
    entry = f"cd {shlex.quote(str(job.folder))} && {shlex.join(['exec', 'env', *variables, *job.command, *placed])}"
    return _text(
        [
            "#!/bin/sh",
            "# Written by `shoal job ray`; submit it with `sh FILE`. All nodes see recipe and run directory.",
            f"exec {shlex.join([*submit, '--', 'sh', '-c', entry])}",
        ]
    )


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """What a job of Kubernetes asks for, besides pods."""

    image: str
    """An image in which ``shoal`` is installed."""
    namespace: str | None = None
    claim: str | None = None
    """A volume claim that all pods can write to (ReadWriteMany): the run directory lies on it."""
    gpus: int = 0
    """Of each pod."""


def kubernetes_manifest(job: Job, options: PodOptions, *, recipe_text: str, arguments: Sequence[str]) -> str:
    """An indexed job, a pod for each node, with the service by which pods find the first one, and the recipe.

    Args:
        job: what runs; its own arguments name files of this machine, which pods do not have.
        options: of the pods.
        recipe_text: the recipe.
        arguments: of ``shoal train`` behind the recipe, without the run directory.
    """
    common = {"name": job.name, **({"namespace": options.namespace} if options.namespace else {})}
    meta = {**common, "labels": {_LABEL: job.name}}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"recipe.toml": recipe_text}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        # Without an address of its own, and before pods are ready: they meet in order to become so.
        "spec": {"clusterIP": "None", "selector": {_LABEL: job.name}, "publishNotReadyAddresses": True},
    }
    batch = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": {_LABEL: job.name}},
                "spec": _pod(job, options, arguments),
            },
        },
    }
    return "".join(f"---\n{write_yaml(document)}" for document in (config, service, batch))


def _pod(job: Job, options: PodOptions, arguments: Sequence[str]) -> dict[str, Any]:
    local = ["--per-node", str(job.per_node)] if job.per_node > 1 else []
    runs = Path(_RUN_FOLDER) / job.name
    variables = {
        "WORLD_SIZE": str(job.num_processes),
        "LOCAL_WORLD_SIZE": str(job.per_node),
        "MASTER_ADDR": f"{job.name}-0.{job.name}",
        "MASTER_PORT": str(MASTER_PORT),
    }
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": job.name}},
        # Ranks of one pod exchange gradients in shared memory, of which a container has 64 MB.
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}}
        if options.claim
        else {"name": "runs", "emptyDir": {}},
    ]
    container: dict[str, Any] = {
        "name": "shoal",
        "image": options.image,
        "command": ["shoal", "train", f"{_RECIPE_FOLDER}/recipe.toml", *arguments, "--run-dir", str(runs), *local],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [
            {"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "runs", "mountPath": _RUN_FOLDER},
        ],
    }
    if options.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": options.gpus}}
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        # SIGTERM finishes the step and writes a checkpoint.
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": volumes,
    }


def _exports(environment: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
