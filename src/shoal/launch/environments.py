"""The variables by which a launcher tells a process its place: read from any launcher, and written for our own ranks.

One pure function reads them all (``detect/launchers.py`` has a reader for each), so the same worker runs under torchrun, SLURM,
MPI and whatever else names a rank. What is seen and not understood is refused: taking such a process for the only one would train
a whole run on every host. Our own ranks get torchrun's contract, but for the address of a store: they meet in a file. What only
Shoal's supervisor gives is named ``SHOAL_*``.
"""

import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.core.errors import RequestError
from shoal.core.place import Place
from shoal.launch.detect.launchers import LOOPBACK_ADDRESS, READERS, refuse_others
from shoal.telemetry.statusboard import RankStatus, StatusBoard

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
DETECT_VARIABLE = "SHOAL_LAUNCHER"
"""Set to ``off``, no launcher is looked for: the process is alone, whatever is set besides."""
_OURS = "SHOAL_"


def read_place(environment: Mapping[str, str]) -> Place:
    """The place that a launcher's variables give; a process that nobody launched is alone. Pure.

    Raises:
        RequestError: the variables make no sense, two launchers disagree, or one is there that gave this process no rank.
    """
    if environment.get(DETECT_VARIABLE, "auto") == "off":
        return Place()
    found = {name: place for name, read in READERS.items() if (place := read(environment)) is not None}
    if not found:
        refuse_others(environment)
        return Place()
    trusted, *others = found.values()
    for other in others:
        if _is_nested(trusted, other, environment):
            continue
        if (other.rank, other.world_size) != (trusted.rank, trusted.world_size):
            raise RequestError(
                f"{trusted.launcher} makes this process rank {trusted.rank} of {trusted.world_size} "
                f"({', '.join(trusted.evidence)}), and {other.launcher} rank {other.rank} of {other.world_size} "
                f"({', '.join(other.evidence)}); unset the variables of one of them"
            )
        if _are_apart(_given_address(trusted), _given_address(other)):
            raise RequestError(
                f"{trusted.launcher} says that rank 0 is at {trusted.address} ({', '.join(trusted.evidence)}), and "
                f"{other.launcher} that it is at {other.address} ({', '.join(other.evidence)}); unset the variables of one of "
                "them, or let both name one host"
            )
    return trusted


def _given_address(place: Place) -> str:
    """Where a launcher says that rank 0 is; empty where it says nothing, and all ranks are on this host."""
    is_derived = place.address == LOOPBACK_ADDRESS and not any(LOOPBACK_ADDRESS in one for one in place.evidence)
    return "" if is_derived else place.address


def _are_apart(one: str, other: str) -> bool:
    """Whether two addresses are of two hosts, as far as their texts tell: a name and a number may be of one."""
    if not one or not other or _is_number(one) != _is_number(other):
        return False
    if _is_number(one):
        return ipaddress.ip_address(one.strip("[]")) != ipaddress.ip_address(other.strip("[]"))
    labels, others = one.lower().split("."), other.lower().split(".")
    common = min(len(labels), len(others))
    return labels[:common] != others[:common]


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return False
    return True


def _is_nested(inner: Place, outer: Place, environment: Mapping[str, str]) -> bool:
    """True where a launcher starts another one, whose ranks are then not its own: torchrun as a task of SLURM, say."""
    if inner.launcher in ("torchrun", "supervisor"):
        return inner.launcher == "supervisor" or "TORCHELASTIC_RUN_ID" in environment
    return inner.launcher in ("openmpi", "mpich") and outer.launcher == "slurm"


def refuse_launcher(environment: Mapping[str, str], verb: str) -> None:
    """Refuse to start processes of our own as one of several ranks of a launcher: each of them would start as many.

    Raises:
        RequestError: names the launcher and what to do.
    """
    place = read_place(environment)
    if place.is_launched and place.launcher != "supervisor" and place.world_size > 1:
        raise RequestError(
            f"{verb} starts its own processes on this machine, and this is rank {place.rank} of {place.world_size} of "
            f"{place.launcher} ({', '.join(place.evidence)}): each rank would do the same again; run it once, outside of "
            f"{place.launcher}, or with {DETECT_VARIABLE}=off"
        )


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


def rank_environment(*, rank: int, num_ranks: int, local_ranks: Sequence[int] = ()) -> dict[str, str]:
    """The variables that tell a rank its place among the others.

    Args:
        rank: its number in the run.
        num_ranks: of the run.
        local_ranks: those on its host, where others are elsewhere.
    """
    local = list(local_ranks or range(num_ranks))
    world_size = str(num_ranks)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(local.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
    }
