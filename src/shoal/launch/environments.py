"""The variables by which a launcher tells a process its place: torchrun's contract, read and, for our own ranks, written.

The same worker therefore runs under torchrun, SLURM and Kubeflow, but for the address of a store: the supervisor's ranks meet
in a file. What only Shoal's supervisor gives is named ``SHOAL_*``.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from shoal.core.errors import RequestError
from shoal.core.place import Place
from shoal.telemetry.statusboard import RankStatus, StatusBoard

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_OURS = "SHOAL_"


def read_place(environment: Mapping[str, str]) -> Place:
    """The place that a launcher's variables give; a process that nobody launched is alone. Pure.

    Raises:
        RequestError: the variables are there but make no sense.
    """
    if "RANK" not in environment:
        return Place()
    try:
        place = Place(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            generation=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
            is_launched=True,
            store=environment.get("SHOAL_STORE", ""),
        )
    except (KeyError, ValueError) as error:
        raise RequestError(f"the launcher set RANK but not a whole WORLD_SIZE beside it: {error}") from error
    if not 0 <= place.rank < place.world_size:
        raise RequestError(f"the launcher gave RANK={place.rank} of WORLD_SIZE={place.world_size}")
    return place


def attach_status(environment: Mapping[str, str]) -> RankStatus | None:
    """This rank's status on the supervisor's board; None when nobody supervises."""
    if "SHOAL_BOARD_FD" not in environment:
        return None
    place = read_place(environment)
    rank_status = StatusBoard.attach(int(environment["SHOAL_BOARD_FD"]), place.world_size).of_rank(place.rank)
    rank_status.claim()
    return rank_status


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process inherits: a supervisor inside a rank of another one must not hand on that one's descriptors."""
    return {name: value for name, value in environment.items() if not name.startswith(_OURS)}


def process_environment(*, threads: int, run_dir: Path | None = None, run_id: str = "") -> dict[str, str]:
    """The variables of every process of a run, without those it inherits.

    Args:
        threads: compute threads of each process.
        run_dir: by which the doctor finds the process.
        run_id: by which the doctor knows that the process is one of ours.
    """
    values = {
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin while they wait make a step thirty times slower when anything else wants the core.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        # What a process printed before it was killed must have left it; and a crash in native code should say where.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "SHOAL_SUPERVISOR_PID": str(os.getpid()),
    }
    if run_dir is not None:
        values |= {"SHOAL_RUN_DIR": str(run_dir.resolve()), "TORCHELASTIC_RUN_ID": run_id}
    return values


def rank_environment(*, rank: int, num_ranks: int) -> dict[str, str]:
    """The variables that tell a rank its place among the others on this machine."""
    world_size = str(num_ranks)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
    }
