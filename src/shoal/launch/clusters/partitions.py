"""Whether a SLURM cluster has as many nodes as a run asks for: SLURM itself lets a job that is too large wait for ever."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import RequestError
from shoal.launch.clusters.job import Job
from shoal.launch.clusters.slurm import nodes_of_allocation

_SINFO = ("sinfo", "--noheader", "--format=%P|%D|%c")
_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A queue of SLURM."""

    name: str
    nodes: int
    cores: int
    """Of its largest node."""
    is_default: bool


def read_partitions(text: str) -> list[Partition]:
    """The partitions in what ``sinfo`` says, a line for each kind of node. Pure."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([^|*]+)(\*?)\|(\d+)\|(\d+)\+?", line.strip())
        if match is None:
            continue
        name, star, nodes, cores = match.groups()
        known = found.get(name, Partition(name=name, nodes=0, cores=0, is_default=bool(star)))
        found[name] = Partition(
            name=name,
            nodes=known.nodes + int(nodes),
            cores=max(known.cores, int(cores)),
            is_default=known.is_default,
        )
    return list(found.values())


def find_problem(partitions: Sequence[Partition], job: Job, *, wanted: str = "") -> str:
    """Why a job has no room, with the fix; empty where it has some, or nobody can say. Pure.

    Args:
        partitions: of the cluster.
        job: what is to run.
        wanted: the partition that was asked for; the cluster's own choice when left out.
    """
    if not partitions:
        return ""
    listed = ", ".join(f"{one.name} ({one.nodes} node(s) of up to {one.cores} core(s))" for one in partitions)
    named = [one for one in partitions if (one.name in wanted.split(",") if wanted else one.is_default)]
    if wanted and not named:
        return f"the cluster has no partition {wanted!r}; it has {listed}"
    nodes = max((one.nodes for one in named), default=job.nodes)
    if nodes < job.nodes:
        return (
            f"the run needs {job.nodes} node(s), and partition {named[0].name} has {nodes}; lower --nodes and the plan, or name "
            f"another partition; the cluster has {listed}"
        )
    cores = max((one.cores for one in named), default=job.per_node)
    if cores < job.per_node:
        return (
            f"the run needs {job.per_node} processes on each node, and the nodes of partition {named[0].name} have {cores} "
            f"core(s) at most; use more nodes with fewer processes each (--nodes, --per-node); the cluster has {listed}"
        )
    return ""


def check_room(job: Job, environment: Mapping[str, str], *, partition: str = "") -> None:
    """Refuse a job that would wait for ever, or be refused after its wait; where SLURM does not answer, nothing is refused.

    Raises:
        RequestError: gives both numbers.
    """
    allocated = nodes_of_allocation(environment)
    if allocated is not None:
        if allocated < job.nodes:
            raise RequestError(
                f"the run needs {job.nodes} node(s), and this allocation (job {environment['SLURM_JOB_ID']}) has {allocated}; "
                "lower --nodes and the plan, or ask for a larger allocation"
            )
        return
    if shutil.which(_SINFO[0], path=environment.get("PATH")) is None:
        return
    try:
        asked = subprocess.run(_SINFO, capture_output=True, text=True, timeout=_SECONDS, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired):
        return
    problem = find_problem(
        read_partitions(asked.stdout), job, wanted=partition or environment.get("SLURM_PARTITION", "")
    )
    if asked.returncode == 0 and problem:
        raise RequestError(problem)
