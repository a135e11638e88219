"""Run a function on several real processes, with a deadline and a leak check.

``run_on_ranks(function, 2, argument)`` starts two processes that join a gloo group on loopback, calls ``function(world,
argument)`` in each and returns both results. A rank that raises, dies or does not come back fails the call with its
traceback; whatever happens, no process is left when it returns.
"""

import atexit
import functools
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.comm.parentdeath import die_with_parent
from shoal.comm.world import join_world
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.launch.environments import LOOPBACK, read_place
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import Command, Supervisor

_PRELOAD = ("shoal.testing.ranks", "shoal.testing.parity", "shoal.trainer.loop")
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0
"""After one rank failed the others get this long to fail too; most are stuck in a collective."""


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
        shared = _environment(function, num_ranks, folder, deadline_seconds)
        supervisor = Supervisor(session_client(), environment={**shared, **(environment or {})})
        processes: list[Process] = []
        try:
            for rank in range(num_ranks):
                processes.append(_start(supervisor, rank, folder))
            _wait(processes, folder, deadline)
        finally:
            leaked = _end(supervisor, processes, folder)
        if leaked:
            raise RunError(f"processes {leaked} were left behind by the ranks of {function.__qualname__}")
        return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(num_ranks)]


@functools.cache
def session_client() -> ForkClient:
    """The fork server of this process's tests: torch is imported once in a session, not by every rank."""
    environment = {**os.environ, "PYTHONPATH": _importable(), "OMP_NUM_THREADS": "1"}
    client = ForkClient(_PRELOAD, environment)
    atexit.register(client.close)
    return client


def _importable() -> str:
    """What the caller can import, for ranks to import too."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def _environment(function: Callable[..., Any], num_ranks: int, folder: Path, deadline_seconds: float) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": _importable(),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "SHOAL_SUPERVISOR_PID": str(os.getpid()),
        # In a folder that only this user can enter.
        "SHOAL_STORE": str(folder / "store"),
        "SHOAL_TEST_FUNCTION": f"{sys.modules[function.__module__].__file__}:{function.__qualname__}",
        "SHOAL_TEST_FOLDER": str(folder),
        "SHOAL_TEST_DEADLINE": str(deadline_seconds),
    }


def _start(supervisor: Supervisor, rank: int, folder: Path) -> Process:
    session_client().open()
    command = Command(name=f"rank {rank}", module=__name__, environment={"RANK": str(rank)})
    with (folder / f"output-{rank}.txt").open("wb") as output:
        return supervisor.start(command, Streams(stdout=output.fileno(), stderr=output.fileno()))


def _wait(processes: list[Process], folder: Path, deadline: Deadline) -> None:
    # Ranks that have ended are waited for in ``_end``: until then the session of a rank tells what it left behind.
    while any(process.peek() is None for process in processes):
        if any(process.peek() for process in processes):
            break
        if deadline.is_over:
            waiting = [rank for rank, process in enumerate(processes) if process.peek() is None]
            outputs = "\n".join(f"rank {rank} said:\n{_output(folder, rank)}" for rank in waiting)
            raise RunError(f"ranks {waiting} did not end within {deadline.seconds:g} s\n{outputs}")
        time.sleep(_POLL_SECONDS)
    if any(process.peek() for process in processes):
        raise RunError(_describe_failures(processes, folder))


def _describe_failures(processes: list[Process], folder: Path) -> str:
    """All ranks that failed: which is seen first is chance, and one that lost its peer does not know why."""
    grace = Deadline(seconds=_GRACE_SECONDS)
    while not grace.is_over and any(process.peek() is None for process in processes):
        time.sleep(_POLL_SECONDS)
    return "\n".join(
        f"rank {rank} ended with code {process.peek()}:\n{_output(folder, rank)}"
        for rank, process in enumerate(processes)
        if process.peek() not in (None, 0)
    )


def _output(folder: Path, rank: int) -> str:
    return (folder / f"output-{rank}.txt").read_text(errors="replace")


def _end(supervisor: Supervisor, processes: list[Process], folder: Path) -> list[int]:
    """End every rank, and then whatever still carries the ranks' environment or is in a rank's session; name the latter."""
    for process in processes:
        if process.peek() is None:
            os.kill(process.pid, signal.SIGKILL)
    ranks = {process.pid for process in processes}
    left = [process for process in psutil.process_iter() if _was_started_by_ranks(process, folder, ranks)]
    # A child that dies with its rank may need a moment.
    _, alive = psutil.wait_procs(left, timeout=2)
    for process_left in alive:
        process_left.kill()
        process_left.wait()
    supervisor.close()
    return [process_left.pid for process_left in alive]


def _was_started_by_ranks(process: psutil.Process, folder: Path, ranks: set[int]) -> bool:
    """By the environment that it was started with, or, for a fork, by its session, which is named after the rank."""
    if process.pid in ranks:
        return False
    try:
        return process.environ().get("SHOAL_TEST_FOLDER") == str(folder) or os.getsid(process.pid) in ranks
    except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
        return False


def main() -> None:
    """What each process of ``run_on_ranks`` runs."""
    die_with_parent(int(os.environ["SHOAL_SUPERVISOR_PID"]))
    # A fork has the path of the server, which was started for another test.
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*given, *(entry for entry in sys.path if entry not in given)]
    torch.set_num_threads(1)
    path, _, name = os.environ["SHOAL_TEST_FUNCTION"].rpartition(":")
    folder = Path(os.environ["SHOAL_TEST_FOLDER"])
    function = getattr(_load(Path(path)), name)
    arguments = torch.load(folder / "arguments.pt", weights_only=True)
    world = join_world(read_place(os.environ), deadline_seconds=float(os.environ["SHOAL_TEST_DEADLINE"]))
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


if __name__ == "__main__":
    main()
