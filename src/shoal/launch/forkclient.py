"""Starting processes from a fork server, seen from the one who starts them: no torch, and every process is its own child.

A process that was started here is what ``subprocess`` would have started: its parent sees it die at once, with its exit code,
and it dies with its parent. Where the system cannot do that, or the server dies, the caller starts interpreters by itself.
``docs/design/0011-processes.md`` says why this is not the standard library's ``multiprocessing.forkserver``.

Linux hands an orphan to the nearest ancestor that asked for orphans. That is how a process that the server forked becomes a child
of this one, and this one asks only while a fork is under way: the orphans of anything else it starts are not for it to wait for.
"""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from shoal.core.clock import Deadline
from shoal.launch.process import Process, Streams, start_program, wait_readable

READY = b"ready"
"""What a fork server says when it has imported everything."""
PREPARE, RELEASE = b"prepare", b"release"
"""Before and after the forks of processes that share what was built once (``template.py``)."""
NOT_TOLD = b"-"
"""What was to be built cannot be shared, for a reason that the processes will say by themselves."""
TITLE_ROOM = "-" * 1024
"""An argument that means nothing: its memory holds the command line of a fork, for those who look from outside."""
FEWEST_TO_FORK = 2
"""One process alone is sooner there by itself than from a server that has to be started first."""
PRELOAD_OPTIMIZER = "shoal.optim.build:warm_up"
"""To be preloaded for processes that will make an optimizer."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_PRELOAD_SECONDS, _FORK_SECONDS = 120.0, 20.0
_MOST_FAILURES = 2
_MOST_ANSWER = 4096
_ADOPTING = threading.Lock()


class ForkClient:
    """A fork server and the socket to it; opened from the main thread, for what is forked dies with the thread that opened it.

    Args:
        preload: what the server imports, ``module`` or ``module:function`` to call; nothing for no server.
        environment: of the server, while it imports.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._preload = tuple(preload)
        self._environment = dict(environment)
        self._server: Process | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._preloading = Deadline(seconds=_PRELOAD_SECONDS)
        self._is_preparing = False
        self._num_failed = 0
        self._owner = 0
        self.problem = ""
        """Why the last server is of no use; empty when it is."""
        self.unprepared = ""
        """Why processes do not share what ``prepare`` was to build; empty when they do, or say it by themselves."""

    def open(self) -> None:
        """Begin to start a server, unless there is one or nothing to preload, or the system has no way. Returns at once."""
        if self._socket is not None and self._owner != os.getpid():
            self._socket.close()  # This process is a fork, and the server is the parent's.
            self._server, self._socket, self._is_ready, self._is_preparing = None, None, False, False
        if not self._preload or self._socket is not None or self._num_failed >= _MOST_FAILURES or not _can_adopt():
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {
                **self._environment,
                # numpy's own threads would not survive a fork, and nothing there needs them.
                "OPENBLAS_NUM_THREADS": "1",
                "SHOAL_SUPERVISOR_PID": str(os.getpid()),
            }
            try:
                self._server = start_interpreter(
                    ["shoal.launch.child", "shoal.launch.forkserver", str(theirs.fileno()), *self._preload, TITLE_ROOM],
                    environment=environment,
                    descriptor=theirs.fileno(),
                )
            except OSError:
                ours.close()
                return
        self._socket, self._owner = ours, os.getpid()
        self._preloading = Deadline(seconds=_PRELOAD_SECONDS)

    @property
    def is_ready(self) -> bool:
        """Whether ``start`` would not have to wait: the server is ready, or there is none, or none any more by its deadline."""
        is_preloading = self._socket is not None and not self._is_ready
        if is_preloading and (self._preloading.is_over or self._can_be_read()):
            self.wait()
        return self._socket is None or self._is_ready

    def wait(self, *others: int) -> bool:
        """Wait until it can fork, or until another descriptor can be read; False in that case.

        True also where there is no server to wait for.
        """
        if self._socket is None or self._is_ready:
            return True
        ours = self._socket.fileno()
        readable = wait_readable([ours, *others], self._preloading.remaining)
        if ours in readable or not readable:
            answer = self._receive() if readable else b""
            # A server whose template cannot be shared from has not been touched by it.
            self._is_ready = answer == READY or (self._is_preparing and bool(answer))
            if self._is_preparing and answer not in (READY, NOT_TOLD, b""):
                self.unprepared = answer.decode(errors="replace")
            if not self._is_ready:
                doing = "prepared what ranks share" if self._is_preparing else "imported"
                self._fail(answer.decode(errors="replace") or f"it died or hung while it {doing}")
            self._is_preparing = False
            return True
        return False

    def prepare(
        self, function: str, arguments: Sequence[str], *, environment: Mapping[str, str], seconds: float
    ) -> None:
        """Begin to call ``module:function`` once for the processes that are started from now on, until ``release``.

        They share what it leaves in memory. Returns at once; ``wait`` waits for it, and ``unprepared`` says why it came to
        nothing: processes are then forked as before.

        Args:
            function: what is called, in a process that is forked for it.
            arguments: of the function.
            environment: all of it.
            seconds: how long it may take.
        """
        self.unprepared = ""
        if self._socket is None or not self._is_ready:
            return
        with contextlib.ExitStack() as opened:
            text, here = os.memfd_create("shoal-fork-order"), os.open(".", os.O_PATH)
            for descriptor in (text, here):
                opened.callback(os.close, descriptor)
            order = {"function": function, "arguments": list(arguments), "environment": dict(environment)}
            os.write(text, json.dumps(order).encode())
            try:
                socket.send_fds(self._socket, [PREPARE], [text, here])
            except OSError:
                self._fail("it died")
                return
        self._is_ready, self._is_preparing = False, True
        self._preloading = Deadline(seconds=seconds)

    def release(self) -> None:
        """Let go of what was prepared: the memory is then that of the processes which share it, and of nobody else."""
        if self._socket is not None and self._is_ready:
            with contextlib.suppress(OSError):
                self._socket.send(RELEASE)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        streams: Streams,
        descriptors: Sequence[int] = (),
        name: str = "",
    ) -> Process | None:
        """Fork a process that calls ``main`` of a module, in this directory; None where there is no server.

        One call at a time.

        Args:
            module: what runs.
            arguments: of its command line.
            environment: all of it.
            streams: its standard input, output and error.
            descriptors: open files that it finds under the same numbers.
            name: what messages call the process.

        Raises:
            OSError: there is no descriptor left to watch it by.
        """
        self.wait()
        if self._socket is None or not self._is_ready:
            return None
        order = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "descriptors": list(descriptors),
        }
        with contextlib.ExitStack() as opened:
            # The order may be longer than a message: an environment has no limit that matters.
            text = os.memfd_create("shoal-fork-order")
            go, let_go = os.pipe()
            here = os.open(".", os.O_PATH)
            empty = os.open(os.devnull, os.O_RDWR)
            for descriptor in (text, go, let_go, here, empty):
                opened.callback(os.close, descriptor)
            os.write(text, json.dumps(order).encode())
            given = (streams.stdin, streams.stdout, streams.stderr)
            standard = [empty if descriptor == subprocess.DEVNULL else descriptor for descriptor in given]
            try:
                with _adopting_orphans():
                    sent = [text, go, here, *standard, *descriptors]
                    socket.send_fds(self._socket, [b"fork"], sent)
                    pid = int(self._receive())
            except (OSError, ValueError):
                # Should it have forked, that process ends when the pipe is closed here.
                self._fail("it died or hung")
                return None
            self._num_failed = 0
            os.write(let_go, b"!")
            return Process(pid, name)

    def _can_be_read(self, seconds: float = 0.0) -> bool:
        assert self._socket is not None
        return bool(wait_readable([self._socket.fileno()], seconds))

    def _receive(self) -> bytes:
        """The server's next message; empty when it died or is silent."""
        if not self._can_be_read(_FORK_SECONDS):
            return b""
        assert self._socket is not None
        return self._socket.recv(_MOST_ANSWER)

    def close(self) -> None:
        """End the server. What was started is the caller's, and lives on."""
        if self._server is not None and self._owner == os.getpid():
            self._server.kill()
            with contextlib.suppress(TimeoutError):
                self._server.wait()
        if self._socket is not None:
            self._socket.close()
        self._server, self._socket, self._is_ready, self._is_preparing = None, None, False, False

    def _fail(self, problem: str) -> None:
        """There is none now. ``open`` tries again, but not for ever: what cannot be imported cannot be imported."""
        self.problem = problem
        self._num_failed += 1
        self.close()


def start_interpreter(arguments: Sequence[str], *, environment: Mapping[str, str], descriptor: int) -> Process:
    """Start ``python -m ARGUMENTS`` without input or output, with one descriptor besides, for a fork server to be."""
    # What it says when it cannot import is said again by the processes, which are started by themselves then.
    return start_program(
        [sys.executable, "-m", *arguments],
        name="fork server",
        environment=environment,
        streams=Streams(),
        descriptors=[descriptor],
    )


def _can_adopt() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """The kernel makes this process the parent of its orphaned descendants.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    with _ADOPTING:
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
        try:
            yield
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value), 0, 0, 0)
