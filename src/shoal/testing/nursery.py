"""A process that has imported torch and Shoal and waits: ranks of tests are forked from it, in milliseconds instead of seconds.

Importing costs some three seconds of a core for every process, and a test session starts hundreds. The nursery pays it once. It
computes nothing and has one thread, so a fork of it is what a fresh process is after its imports, but for two things: all ranks
have one seed for the hashes of strings, and the interpreter is not torn down at their end, as in runs of the ``shoal`` command
(``launch/forkserver.py``). Unlike there, the process of the tests does not become the ranks' parent: orphans of whatever else it
starts would come to it too. Linux only; elsewhere every rank has an interpreter of its own (``testing/ranks.py``).

    nursery -> keeper (one for each rank: writes its pid, waits, and writes its exit code into a pipe) -> rank

Each dies with the one before it, and the nursery with whoever started it.
"""

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from shoal.comm.parentdeath import die_with_parent
from shoal.core.errors import RunError
from shoal.launch.child import count_threads, run_to_end, take_descriptors

_WARM = ("shoal.testing.ranks", "shoal.testing.parity", "shoal.trainer.loop")
_MOST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 16
_START_SECONDS, _LEAVE_SECONDS = 60.0, 10.0
CAN_FORK = hasattr(os, "pidfd_open")


class ForkedRank:
    """A rank of the nursery; what ``subprocess.Popen`` would offer of it."""

    def __init__(self, told: int) -> None:
        self._told, self._text = told, b""
        self.returncode: int | None = None
        self._keeper: int | None = None
        self.pid = 0
        while self.pid == 0:
            if not select.select([told], [], [], _START_SECONDS)[0]:
                os.close(told)
                raise RunError(f"the nursery of ranks has started none within {_START_SECONDS:g} s")
            self._read()
            if self.pid == 0 and self.returncode is not None:
                raise RunError("the nursery of ranks ended before it had started one; what it printed says why")

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def kill(self) -> None:
        """Kill it, unless it has ended. Its pid is its own until its keeper has told of its end."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end."""
        while self.returncode is None:
            self._read()
        return self.returncode

    def _read(self) -> None:
        data = os.read(self._told, 64)
        self._text += data
        lines = self._text.split(b"\n")
        if self.pid == 0 and len(lines) > 1:
            self.pid, keeper = map(int, lines[0].split())
            with contextlib.suppress(ProcessLookupError):
                self._keeper = os.pidfd_open(keeper)
        if len(lines) > 2:
            self._end(int(lines[1]))
        elif not data:
            # The keeper is dead, and it took its rank with it.
            self._end(-int(signal.SIGKILL))

    def _end(self, code: int) -> None:
        self.returncode = code
        os.close(self._told)
        if self._keeper is not None:
            # Until it has gone too: whoever counts processes now must find none of these.
            select.select([self._keeper], [], [], _LEAVE_SECONDS)
            os.close(self._keeper)


class Nursery:
    """See the module; started at the first rank, and again after a fork of the process that has it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._owner = 0

    def start(self, call: str, environment: Mapping[str, str], *, output: IO[bytes]) -> ForkedRank:
        """Fork a rank.

        Args:
            call: what it runs, ``module:function``.
            environment: all of it.
            output: takes what it prints.
        """
        read, write = os.pipe()
        try:
            order = {
                "call": call,
                "environment": dict(environment),
                "path": sys.path,
                "folder": os.getcwd(),
            }
            self._send(json.dumps(order).encode(), [write, output.fileno()])
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return ForkedRank(read)

    def _send(self, order: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._open(), [order], descriptors)
        except BrokenPipeError:
            # It died after it was looked at; another one is there in a moment.
            self.close()
            socket.send_fds(self._open(), [order], descriptors)

    def _open(self) -> socket.socket:
        is_alive = self._process is not None and self._owner == os.getpid() and self._process.poll() is None
        if not is_alive or self._line is None:
            self.close()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "shoal.testing.nursery", str(theirs.fileno())],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                        "OMP_NUM_THREADS": "1",
                        "OPENBLAS_NUM_THREADS": "1",
                        "SHOAL_SUPERVISOR_PID": str(os.getpid()),
                    },
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._line, self._owner = ours, os.getpid()
            atexit.register(self.close)
        return self._line

    def close(self) -> None:
        """End it, if it is this process's own; the next rank starts another."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        if self._line is not None:
            self._line.close()
        self._process, self._line = None, None


def main() -> None:
    """Entry point: forks what is asked for until nobody asks."""
    die_with_parent(int(os.environ["SHOAL_SUPERVISOR_PID"]))
    line = socket.socket(fileno=int(sys.argv[1]))
    for module in _WARM:
        importlib.import_module(module)
    assert count_threads() == 1, (
        f"{count_threads()} threads run here: a fork would copy one of them, and the locks of all"
    )
    # Keepers are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return
        nursery = os.getpid()
        if os.fork() == 0:
            line.close()
            _keep(json.loads(data), descriptors, nursery)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(order: Mapping[str, Any], descriptors: Sequence[int], nursery: int) -> None:
    """Be the keeper of one rank, and never return."""
    die_with_parent(nursery)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told, keeper = descriptors[0], os.getpid()
    rank = os.fork()
    if rank == 0:
        os.close(told)
        _become(order, descriptors[1], keeper)
    os.close(descriptors[1])
    os.write(told, f"{rank} {keeper}\n".encode())
    # Told before it is reaped: until then the pid is the rank's own.
    ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    os.write(told, f"{code}\n".encode())
    os.waitpid(rank, 0)
    os._exit(0)


def _become(order: Mapping[str, Any], output: int, keeper: int) -> NoReturn:
    """Be the rank."""
    die_with_parent(keeper)
    os.setsid()
    take_descriptors({0: os.open(os.devnull, os.O_RDONLY), 1: output, 2: os.dup(output)})
    os.environ.clear()
    os.environ.update(order["environment"], SHOAL_SUPERVISOR_PID=str(keeper))
    sys.path[:] = order["path"]
    os.chdir(order["folder"])
    module, _, function = order["call"].partition(":")
    run_to_end(module, [], function=function)


if __name__ == "__main__":
    main()
