"""Starting a rank: its environment, the descriptors it inherits, and the handle by which it is watched and ended.

The environment is torchrun's, so that the same worker runs under torchrun, SLURM and Kubeflow, but for the address of a store:
these ranks meet in a file. What only Shoal's supervisor gives is named ``SHOAL_*``. Nothing is started through a shell, and
nothing is killed that was not started here.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from shoal.core.errors import RunError
from shoal.core.rundir import RunDir
from shoal.launch.forkclient import ForkClient, ForkedProcess, Streams, kill_group, reap
from shoal.launch.launch import LaunchRequest
from shoal.launch.output import Log, RankStream
from shoal.telemetry.statusboard import StatusBoard

_KILLED_SECONDS = 10.0


class StoreFile:
    """The file in which the ranks of one generation meet (torch's ``FileStore``), for this user alone.

    On Linux it has no name: the ranks inherit its descriptor, and nothing is left when they are gone, however they ended.
    Elsewhere it lies in a folder that only this user can enter, until ``close``.
    """

    def __init__(self) -> None:
        self.descriptors: tuple[int, ...] = ()
        """What a rank has to inherit."""
        self._folder = ""
        if sys.platform == "linux":
            self.descriptors = (os.memfd_create("shoal-store"),)
            self.path = f"/proc/self/fd/{self.descriptors[0]}"
        else:
            self._folder = tempfile.mkdtemp(prefix="shoal-store-")
            self.path = os.path.join(self._folder, "store")

    def close(self) -> None:
        """Let go of it; ranks that run keep what they inherited. May be called twice."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def rank_environment(
    request: LaunchRequest, *, rank: int, generation: int, board_fd: int, store: str
) -> dict[str, str]:
    """The variables of one rank, without those it inherits."""
    world_size = str(request.num_ranks)
    values = {
        "RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(request.config.max_restarts),
        "TORCHELASTIC_RUN_ID": request.run_id,
        "OMP_NUM_THREADS": str(request.threads),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        # What a rank printed before it was killed must have left it; and a crash in native code should say where.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "SHOAL_SUPERVISOR_PID": str(os.getpid()),
        "SHOAL_BOARD_FD": str(board_fd),
        "SHOAL_STORE": store,
        "SHOAL_GENERATION": str(generation),
        "SHOAL_RUN_DIR": str(request.run_dir.resolve()),
    }
    return {**values, **request.env}


def server_environment(request: LaunchRequest) -> dict[str, str]:
    """The variables of the process that ranks are forked from: what is looked at before a rank has its own."""
    values = rank_environment(request, rank=-1, generation=0, board_fd=-1, store="")
    return {**_inherited(os.environ), **values}


class RankProcess:
    """A running rank, seen from its parent.

    Args:
        rank: its number.
        process: that runs it.
        pipes: to read its standard output and its standard error from.
        log: takes both.
    """

    def __init__(
        self, rank: int, process: "subprocess.Popen[bytes] | ForkedProcess", pipes: tuple[int, int], log: Log
    ) -> None:
        self.rank = rank
        self.pid = process.pid
        self.log = log
        self.started_at = time.monotonic()
        self.exit_code: int | None = None
        self.ended_at = 0.0
        """Wall-clock seconds; 0 while it runs."""
        self.signals_sent: set[int] = set()
        self.resident_bytes: int | None = None
        self.stdout = RankStream(log, prefix="" if rank == 0 else f"[rank {rank}] ")
        self.stderr = RankStream(log, prefix=f"[rank {rank}] ")
        self.streams = dict(zip(pipes, (self.stdout, self.stderr), strict=True))
        for fd in self.streams:
            os.set_blocking(fd, False)
        self.pid_fd = os.pidfd_open(process.pid) if sys.platform == "linux" else -1
        self._process = process

    @property
    def is_running(self) -> bool:
        """True until its end was seen."""
        return self.exit_code is None

    def send(self, number: int) -> None:
        """Send it a signal. It exists: its process id cannot be reused before ``reap`` has seen its end."""
        if self.is_running:
            self.signals_sent.add(number)
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and whatever it started in its own session."""
        if self.is_running:
            self.signals_sent.add(signal.SIGKILL)
            kill_group(self.pid)
            # One that was forked a moment ago may not have a group of its own yet.
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> bool:
        """Take its exit code if it has ended; also ends what it left running. False while it runs."""
        self.exit_code = reap(self._process)
        if self.exit_code is None:
            return False
        self.ended_at = time.time()
        return True

    def close(self) -> None:
        """Close every descriptor of this rank."""
        for fd in self.streams:
            os.close(fd)
        self.streams = {}
        if self.pid_fd >= 0:
            os.close(self.pid_fd)
            self.pid_fd = -1
        self.log.close()


def start_rank(
    request: LaunchRequest,
    *,
    rank: int,
    board: StatusBoard,
    environment: Mapping[str, str],
    store: StoreFile,
    client: ForkClient,
) -> RankProcess:
    """Start one rank, from the client if that has a cradle.

    Raises:
        RunError: the system could not start it.
    """
    log = Log(RunDir(request.run_dir).log(rank))
    descriptors = (board.fd, *store.descriptors)
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        ours.callback(log.close)
        try:
            (stdout, output), (stderr, errors) = (_open_pipe(ours, theirs) for _ in range(2))
            streams = Streams(stdout=output, stderr=errors)
            process: subprocess.Popen[bytes] | ForkedProcess | None = client.start(
                request.module, request.arguments, environment=environment, streams=streams, descriptors=descriptors
            )
            process = process or subprocess.Popen(
                request.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                # Ctrl-C in the terminal goes to the supervisor alone, which stops the ranks in order.
                start_new_session=True,
                pass_fds=descriptors,
                env={**_inherited(os.environ), **environment},
            )
            try:
                found = RankProcess(rank, process, (stdout, stderr), log)
            except OSError:
                process.kill()
                process.wait(timeout=_KILLED_SECONDS)
                raise
        except OSError as error:
            raise RunError(
                f"cannot start rank {rank} of {request.num_ranks} ({request.command[0]}): {error}"
            ) from error
        ours.pop_all()
        return found


def _open_pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    return reading, writing


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    # A supervisor inside a rank of another one must not hand on that one's descriptors.
    return {name: value for name, value in environment.items() if not name.startswith("SHOAL_")}
