"""SLURM: the ``srun`` that starts the ranks, and what it says of those that failed. Pure.

Inside an allocation (``salloc``, a batch script) the step runs there; elsewhere ``srun`` asks for an allocation, waits for it and
gives it back.
"""

import re
import signal
from collections.abc import Mapping

from shoal.core.errors import RequestError
from shoal.launch.clusters.culprits import TaskEnd
from shoal.launch.clusters.job import Job
from shoal.launch.detect.hostlist import expand_hosts

PROGRAM = "srun"
MISSING = (
    "srun is not here; install SLURM's commands (Debian: apt-get install slurm-client) on a machine of the cluster"
)
_TASKS = re.compile(r"^srun: error: (?:(\S+): )?tasks? ([\d,-]+): (.+)$")
_NODE = re.compile(r"^srun: error: Node failure on (\S+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {description: number for number in signal.Signals if (description := signal.strsignal(number))}


def srun_command(job: Job, *, options: Mapping[str, str] | None = None) -> list[str]:
    """The command line of a step with a task for every process.

    Args:
        job: what runs.
        options: further ones of srun, such as ``partition``, ``time`` and ``account``.
    """
    words = [PROGRAM, f"--nodes={job.nodes}", f"--ntasks={job.num_processes}", f"--ntasks-per-node={job.per_node}"]
    words += [f"--{name}={value}" for name, value in (options or {}).items()]
    words += [f"--job-name={job.name}", f"--chdir={job.folder}", *step_options(job)]
    return [*words, *job.command]


def step_options(job: Job) -> list[str]:
    """What a step does when a task dies: it ends the others, but where they can do without."""
    return ["--kill-on-bad-exit=0", "--wait=0"] if job.survives_deaths else ["--kill-on-bad-exit=1"]


def nodes_of_allocation(environment: Mapping[str, str]) -> int | None:
    """The nodes of the allocation that this process is in; None outside of one."""
    if "SLURM_JOB_ID" not in environment:
        return None
    number = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return int(number) if number.isdigit() else 1


def refuse_task(environment: Mapping[str, str]) -> None:
    """Refuse to start a step in each task of a step.

    Raises:
        RequestError: this process is one of several tasks.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environment and tasks != "1":
        raise RequestError(
            f"--on slurm starts the tasks, and this is already task {environment.get('SLURM_PROCID', '?')} of {tasks}: leave out "
            "--on under srun, or start it once"
        )


class SlurmEnds:
    """Reads, line by line, which tasks an ``srun`` says that failed: ``srun: error: n02: task 1: Killed``."""

    def read(self, line: str) -> list[TaskEnd]:
        """What a line tells."""
        if match := _NODE.match(line):
            return [TaskEnd(rank=None, host=match[1], exit_code=None, cause="SLURM says that the node failed")]
        match = _TASKS.match(line)
        if match is None:
            return []
        hosts = _hosts(match[1] or "")
        code = _code(match[3])
        named = hosts[0] if len(hosts) == 1 else ""
        return [
            TaskEnd(rank=rank, host=named, exit_code=code, cause="" if code is not None else match[3])
            for rank in _numbers(match[2])
        ]


def _code(said: str) -> int | None:
    if match := _EXITED.search(said):
        return int(match[1])
    number = _SIGNALS.get(said.partition(" (")[0])
    return None if number is None else -number


def _hosts(text: str) -> list[str]:
    try:
        return expand_hosts(text) if text else []
    except RequestError:
        return [text]


def _numbers(text: str) -> list[int]:
    """``0-1,3`` -> 0, 1, 3."""
    found: list[int] = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), int(last or first) + 1)
    return found
