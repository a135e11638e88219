"""What is started, whoever starts it: a command that every process of the run has, and how the processes lie on nodes. Pure.

There is no scheduler here. SLURM, MPI, Ray and Kubernetes each get their own words for this value: a command line
(``slurm.py``, ``mpi.py``), actors (``ray.py``) or a file (``jobfiles.py``).
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.errors import RequestError

MASTER_PORT = 29500
"""Where ranks meet when a job file has to say so beforehand; torch's own choice."""
_LONGEST_NAME = 52
"""A pod's name is the job's with an index behind it, and a label of DNS has 63 letters."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to be started on a cluster."""

    name: str
    """For the cluster's lists: small letters, digits and dashes."""
    arguments: tuple[str, ...]
    """Of ``shoal``, the same for every process: ``train``, the recipe, and options."""
    nodes: int
    per_node: int
    folder: Path
    """Where the processes are started."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the processes need of this one's variables."""
    survives_deaths: bool = False
    """True for a run with parameter servers: what is left goes on when a process dies."""

    @property
    def num_processes(self) -> int:
        """Of the whole run."""
        return self.nodes * self.per_node

    @property
    def command(self) -> list[str]:
        """What every process runs: this interpreter, found by its path on every node."""
        return [sys.executable, "-m", "shoal", *self.arguments]


def name_job(text: str) -> str:
    """A name that every cluster takes: ``My_Recipe.v2`` -> ``my-recipe-v2``."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def arrange(num_processes: int, *, nodes: int | None, per_node: int | None) -> tuple[int, int]:
    """The nodes of a plan's processes, and how many each of them has; what was left out follows from the plan.

    Raises:
        RequestError: they do not come to the plan's number.
    """
    if nodes is None and per_node is None:
        return 1, num_processes
    if nodes is None:
        assert per_node is not None
        nodes = max(1, num_processes // per_node)
    if per_node is None:
        per_node = max(1, num_processes // nodes)
    if nodes * per_node != num_processes:
        raise RequestError(
            f"{nodes} node(s) of {per_node} process(es) are {nodes * per_node}, and the plan has {num_processes}; change "
            "--nodes, --per-node or the plan"
        )
    return nodes, per_node


@dataclass(frozen=True, kw_only=True)
class Slots:
    """A host, and how many processes it takes."""

    host: str
    count: int


def read_slots(hosts: str, *, per_node: int | None) -> list[Slots]:
    """The hosts of ``a:2,b:2``, or of ``a,b`` with ``per_node`` processes each.

    Raises:
        RequestError: a name is empty or there twice, or a number is none.
    """
    found: list[Slots] = []
    for word in hosts.split(","):
        host, colon, number = word.strip().partition(":")
        if not host or (colon and not number.isdigit()) or (colon and int(number) < 1):
            raise RequestError(f"--hosts {hosts}: {word!r} is not HOST or HOST:PROCESSES; write a:2,b:2")
        if host in {one.host for one in found}:
            raise RequestError(f"--hosts {hosts} names {host} twice; write it once, with all of its processes")
        found.append(Slots(host=host, count=int(number) if colon else per_node or 1))
    return found


def check_slots(slots: Sequence[Slots], num_processes: int) -> None:
    """Refuse hosts that do not take a run's processes exactly.

    Raises:
        RequestError: gives both numbers.
    """
    total = sum(one.count for one in slots)
    if total != num_processes:
        named = ",".join(f"{one.host}:{one.count}" for one in slots)
        raise RequestError(
            f"--hosts {named} are {total} process(es), and the plan has {num_processes}; change one of them"
        )
