"""MPI: the ``mpirun`` that starts the ranks, and what it says of those that failed. Pure, but for a look at which MPI is there.

MPI does not tell its processes where rank 0 is, so the command does: the first host. Cores are not bound: a rank with several
threads would get one core for all of them. What ``mpirun`` itself ends has a second, so it is asked by SIGUSR2, which it hands on
and ranks understand, to let them save.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Literal

from shoal.core.errors import RequestError
from shoal.launch.clusters.culprits import TaskEnd
from shoal.launch.clusters.job import Job, Slots

PROGRAM = "mpirun"
MISSING = "mpirun is not here; install Open MPI or MPICH (Debian: apt-get install openmpi-bin), or load its module"
MpiKind = Literal["openmpi", "mpich"]
_VERSION_SECONDS = 20.0
_SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_PROCESS, _EXIT_CODE = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]"), re.compile(r"Exit code: +(\d+)")
_HYDRA_WHERE, _HYDRA_CODE = re.compile(r"= +PID \d+ RUNNING AT (\S+)"), re.compile(r"= +EXIT CODE: (\d+)")


def which_mpi() -> MpiKind:
    """Which MPI this machine's ``mpirun`` belongs to.

    Raises:
        RequestError: there is none, or it is neither Open MPI nor MPICH.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise RequestError(MISSING)
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS)
    # Called by another name, Open MPI's program calls itself OpenRTE.
    if "Open MPI" in asked.stdout or "OpenRTE" in asked.stdout:
        return "openmpi"
    if "HYDRA" in asked.stdout or "Intel(R) MPI" in asked.stdout:
        return "mpich"
    raise RequestError(
        f"{program} is neither Open MPI nor MPICH, and its options are not known here; write its own command"
    )


def mpirun_command(job: Job, kind: MpiKind, *, slots: Sequence[Slots] = (), is_root: bool | None = None) -> list[str]:
    """The command line; without hosts the processes are on this one, or where a scheduler that started us has room."""
    words = [PROGRAM, "-np", str(job.num_processes)]
    variables = dict(job.environment)
    if slots:
        variables.setdefault("MASTER_ADDR", slots[0].host)
    if kind == "openmpi":
        if os.geteuid() == 0 if is_root is None else is_root:
            words.append("--allow-run-as-root")
        words += ["--bind-to", "none"]
        words += ["--host", ",".join(f"{one.host}:{one.count}" for one in slots)] if slots else ["--oversubscribe"]
        for name, value in variables.items():
            words += ["-x", f"{name}={value}"]
    else:
        words += ["-bind-to", "none"]
        if slots:
            words += ["-hosts", ",".join(f"{one.host}:{one.count}" for one in slots)]
        for name, value in variables.items():
            words += ["-genv", name, value]
    return [*words, *job.command]


class MpiEnds:
    """Reads, line by line, which processes an ``mpirun`` says that failed."""

    def __init__(self) -> None:
        self._half: int | str | None = None

    def read(self, line: str) -> list[TaskEnd]:
        """What a line tells, with those before it."""
        if match := _SIGNALLED.search(line):
            return [TaskEnd(rank=int(match[1]), host=match[2], exit_code=-int(match[3]))]
        if match := _PROCESS.search(line):
            self._half = int(match[1])
        elif match := _HYDRA_WHERE.search(line):
            self._half = match[1]
        elif (match := _EXIT_CODE.search(line)) and isinstance(self._half, int):
            return [TaskEnd(rank=self._half, exit_code=int(match[1]))]
        elif (match := _HYDRA_CODE.search(line)) and isinstance(self._half, str):
            # hydra names no rank, and a signal as if it were a code.
            return [
                TaskEnd(rank=None, host=self._half, exit_code=-int(match[1]) if int(match[1]) < 65 else int(match[1]))
            ]
        return []
