"""Run a function on several real processes, with a deadline and a leak check.

``run_on_ranks(function, 2, argument)`` starts two processes that join a gloo group on loopback, calls ``function(world,
argument)`` in each and returns both results. A rank that raises, dies or does not come back fails the call with its
traceback; whatever happens, no process is left when it returns.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from shoal.comm.parentdeath import die_with_parent
from shoal.comm.world import join_world
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.testing.nursery import CAN_FORK, ForkedRank, Nursery

_STARTER = "from shoal.testing.ranks import run_this_rank; run_this_rank()"
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0
"""After one rank failed the others get this long to fail too; most are stuck in a collective."""
_NURSERY = Nursery()
Rank = subprocess.Popen[bytes] | ForkedRank


def run_on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    deadline_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(world, *arguments)`` on ``num_ranks`` processes and return what each returned, by rank.

    Args:
        function: a function at the top level of a file; each process loads that file and finds it by name.
        num_ranks: processes to start.
        arguments: tensors and plain values (numbers, texts, lists, dicts); results are the same kind.
        deadline_seconds: for the whole call.
        environment: further variables for every rank.

    Raises:
        RunError: a rank failed, died or left a process behind, or the deadline passed; says which, with its output.
    """
    deadline = Deadline(seconds=deadline_seconds)
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as name:
        folder = Path(name)
        torch.save(list(arguments), folder / "arguments.pt")
        processes: list[Rank] = []
        try:
            _start(function, num_ranks, folder, deadline_seconds, environment or {}, processes)
            _wait(processes, folder, deadline)
        finally:
            leaked = _end(processes, folder)
        if leaked:
            raise RunError(f"processes {leaked} were left behind by the ranks of {function.__qualname__}")
        return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def _start(
    function: Callable[..., Any],
    num_ranks: int,
    folder: Path,
    deadline_seconds: float,
    extra: Mapping[str, str],
    processes: list[Rank],
) -> None:
    """Start the ranks, each put into ``processes`` as soon as it is there: what has begun is ended whatever comes after."""
    shared = {
        **os.environ,
        # The file may import what the caller can import.
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SHOAL_SUPERVISOR_PID": str(os.getpid()),
        # In a folder that only this user can enter.
        "SHOAL_STORE": str(folder / "store"),
        "SHOAL_TEST_FUNCTION": f"{sys.modules[function.__module__].__file__}:{function.__qualname__}",
        "SHOAL_TEST_FOLDER": str(folder),
        "SHOAL_TEST_DEADLINE": str(deadline_seconds),
        **extra,
    }
    for rank in range(num_ranks):
        with (folder / f"output-{rank}.txt").open("wb") as output:
            processes.append(_start_one({**shared, "RANK": str(rank)}, output))


def _start_one(environment: Mapping[str, str], output: IO[bytes]) -> Rank:
    if CAN_FORK:
        return _NURSERY.start(f"{__name__}:run_this_rank", environment, output=output)
    return subprocess.Popen([sys.executable, "-c", _STARTER], env=environment, stdout=output, stderr=subprocess.STDOUT)


def _wait(processes: list[Rank], folder: Path, deadline: Deadline) -> None:
    waiting = set(range(len(processes)))
    while waiting:
        for rank in sorted(waiting):
            code = processes[rank].poll()
            if code is None:
                continue
            if code != 0:
                raise RunError(_describe_failures(processes, folder))
            waiting.discard(rank)
        if waiting and deadline.is_over:
            outputs = "\n".join(f"rank {rank} said:\n{_output(folder, rank)}" for rank in sorted(waiting))
            raise RunError(f"ranks {sorted(waiting)} did not end within {deadline.seconds:g} s\n{outputs}")
        time.sleep(_POLL_SECONDS)


def _describe_failures(processes: list[Rank], folder: Path) -> str:
    """All ranks that failed: which is seen first is chance, and one that lost its peer does not know why."""
    grace = Deadline(seconds=_GRACE_SECONDS)
    while not grace.is_over and any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)
    return "\n".join(
        f"rank {rank} ended with code {process.poll()}:\n{_output(folder, rank)}"
        for rank, process in enumerate(processes)
        if process.poll() not in (None, 0)
    )


def _output(folder: Path, rank: int) -> str:
    return (folder / f"output-{rank}.txt").read_text(errors="replace")


def _end(processes: list[Rank], folder: Path) -> list[int]:
    """End every rank, and then whatever still carries the ranks' environment; name the latter."""
    for process in processes:
        process.kill()
        process.wait()
    # A rank that never came to be has no pid.
    ranks = {process.pid for process in processes if process.pid}
    left = [process for process in psutil.process_iter() if _was_started_by_ranks(process, folder, ranks)]
    # A child that dies with its rank may need a moment.
    _, alive = psutil.wait_procs(left, timeout=2)
    for process_left in alive:
        process_left.kill()
        process_left.wait()
    return [process_left.pid for process_left in alive]


def _was_started_by_ranks(process: psutil.Process, folder: Path, ranks: set[int]) -> bool:
    """By the environment that it was started with, or, for a fork, by its session, which is named after the rank."""
    try:
        return process.environ().get("SHOAL_TEST_FOLDER") == str(folder) or os.getsid(process.pid) in ranks
    except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
        return False


def run_this_rank() -> None:
    """What each process of ``run_on_ranks`` runs."""
    die_with_parent(int(os.environ["SHOAL_SUPERVISOR_PID"]))
    torch.set_num_threads(1)
    path, _, name = os.environ["SHOAL_TEST_FUNCTION"].rpartition(":")
    folder = Path(os.environ["SHOAL_TEST_FOLDER"])
    function = getattr(_load(Path(path)), name)
    arguments = torch.load(folder / "arguments.pt", weights_only=True)
    world = join_world(os.environ, deadline_seconds=float(os.environ["SHOAL_TEST_DEADLINE"]))
    result = function(world, *arguments)
    torch.save(result, folder / f"result-{world.rank}.pt")
    # Nobody leaves before everybody has arrived: a peer that is still in a collective would see a closed connection.
    world.barrier()
    world.close()


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
