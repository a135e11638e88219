"""Starting ranks from a cradle, seen from the one who starts them: no torch, and every rank is its own child.

A process that was started here is what ``subprocess`` would have started: its parent sees it die at once, with its exit code,
and it dies with its parent. Where the system cannot do that, or the cradle dies, the caller starts interpreters by itself.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.clock import Deadline

READY = b"ready"
"""What a cradle says when it has imported everything."""
ROOM = "-" * 1024
"""An argument that means nothing: its memory holds the command line of a fork, for those who look from outside."""
FEWEST_TO_FORK = 2
"""One process alone is sooner there by itself than from a server that has to be started first."""
PRELOAD_OPTIMIZER = "shoal.optim.build:warm_up"
"""For a cradle of those who will make an optimizer."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_WARM_SECONDS, _FORK_SECONDS = 120.0, 20.0
_END_SECONDS, _LOOK_SECONDS = 10.0, 0.002
_MOST_FAILURES = 2
_MOST_WORD = 4096


class ForkedProcess:
    """A process of the cradle and a child of this one, with what is used of ``subprocess.Popen``.

    What it had started itself, and left in its session, is ended with it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None and _has_ended(self.pid):
            kill_group(self.pid)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def wait(self, timeout: float = _END_SECONDS) -> int:
        """Wait for its end; its exit code.

        Raises:
            TimeoutExpired: it goes on, though it may have been killed: a disk that does not answer holds a process.
        """
        limit = Deadline(seconds=timeout)
        while (code := self.poll()) is None:
            if limit.is_over:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def reap(process: "subprocess.Popen[bytes] | ForkedProcess") -> int | None:
    """The exit code of a process with a session of its own, after what it left running there was killed; None while it runs."""
    if process.returncode is None and hasattr(os, "waitid"):
        if not _has_ended(process.pid):
            return None
        kill_group(process.pid)
    return process.poll()


def kill_group(pid: int) -> None:
    """Kill what a process with a session of its own started there, and itself if it runs.

    To be called before its end is waited for: after that its number, if nobody is left in the group, may be somebody else's.
    """
    # Neither is an error: nobody is left, or only the dead leader is.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Descriptors that become a process's standard ones; they stay the caller's to close."""

    stdin: int = subprocess.DEVNULL
    stdout: int
    stderr: int


def start_interpreter(
    arguments: Sequence[str], *, environment: Mapping[str, str], descriptor: int
) -> "subprocess.Popen[bytes] | ForkedProcess":
    """Start ``python -m ARGUMENTS`` without input or output, in a session of its own, with one descriptor besides."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # What it says when it cannot import is said again by the ranks, which are started by themselves then.
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(descriptor,),
        env=environment,
    )


class ForkClient:
    """See the module; opened from the main thread, for what is forked dies with the thread that opened it.

    Args:
        warm: what the cradle imports, ``module`` or ``module:function``; nothing for no cradle.
        environment: of the cradle, and so of whatever is forked from it.
    """

    def __init__(self, warm: Sequence[str], environment: Mapping[str, str]) -> None:
        self._warm = tuple(warm)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._line: socket.socket | None = None
        self._is_ready = False
        self._num_failed = 0
        self.problem = ""
        """Why the last cradle is of no use; empty when it is."""
        self._adopted_before: bool | None = None
        self._sessions: set[int] = set()

    def open(self) -> None:
        """Begin to warm a cradle up, unless there is one or nothing to import, and if orphans can be had. Returns at once."""
        if not self._warm or self._line is not None or self._num_failed >= _MOST_FAILURES:
            return
        if self._adopted_before is None:
            self._adopted_before = _adopts_orphans()
        if self._adopted_before is None or not _adopt_orphans(True):
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = ["shoal.launch.child", "shoal.launch.forkserver", str(theirs.fileno()), *self._warm, ROOM]
            try:
                # numpy's own threads would not survive a fork, and nothing here needs them.
                variables = {"OPENBLAS_NUM_THREADS": "1", "SHOAL_SUPERVISOR_PID": str(os.getpid())}
                self._process = start_interpreter(
                    arguments, environment={**self._environment, **variables}, descriptor=theirs.fileno()
                )
            except OSError:
                ours.close()
                return
        self._line = ours

    def abandon(self) -> None:
        """Kill the cradle: whoever waits for it in another thread gets none."""
        process = self._process
        if process is not None:
            process.kill()

    def wait(self, *others: int) -> bool:
        """Wait until it can fork, or until one of some descriptors can be read; False in that case.

        True also where there is no cradle to wait for.
        """
        if self._line is None or self._is_ready:
            return True
        line = self._line.fileno()
        readable = _wait_for([line, *others], _WARM_SECONDS)
        if line in readable or not readable:
            word = self._hear()
            self._is_ready = word == READY
            if not self._is_ready:
                self._fail(word.decode(errors="replace") or "it died or hung while it imported")
            return True
        return False

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        streams: Streams,
        descriptors: Sequence[int] = (),
    ) -> ForkedProcess | None:
        """Fork a process that calls the module's ``main``; None where there is no cradle. One call at a time, from any thread.

        Args:
            module: what runs.
            arguments: of its command line.
            environment: put over the cradle's.
            streams: its standard input, output and error.
            descriptors: open files that it finds under the same numbers.
        """
        self.wait()
        if self._line is None or not self._is_ready:
            return None
        order = {
            "module": module,
            "arguments": list(arguments),
            # What the cradle has already need not be sent: an environment can be longer than a message.
            "environment": {name: text for name, text in environment.items() if self._environment.get(name) != text},
            "descriptors": list(descriptors),
        }
        with contextlib.ExitStack() as opened:
            go, let_go = os.pipe()
            empty = os.open(os.devnull, os.O_RDONLY)
            for descriptor in (go, let_go, empty):
                opened.callback(os.close, descriptor)
            stdin = empty if streams.stdin == subprocess.DEVNULL else streams.stdin
            try:
                sent = [go, stdin, streams.stdout, streams.stderr, *descriptors]
                socket.send_fds(self._line, [json.dumps(order).encode()], sent)
                pid = int(self._hear())
            except (OSError, ValueError):
                # Should it have forked, that process ends when the pipe is closed here.
                self._fail("it died or hung")
                return None
            # What a rank before left behind is dead and this process's by now.
            _reap_left(self._sessions)
            self._sessions.add(pid)
            os.write(let_go, b"!")
            return ForkedProcess(pid)

    def _hear(self) -> bytes:
        """The cradle's next word; nothing when it died or is silent."""
        assert self._line is not None
        if not _wait_for([self._line.fileno()], _FORK_SECONDS):
            return b""
        return self._line.recv(_MOST_WORD)

    def close(self) -> None:
        """End the cradle and adopt orphans no longer. What was started is the caller's, and has ended."""
        self._end_cradle()
        if self._adopted_before is not None:
            # This process may be a user's own, which goes on: orphans of whatever it starts later are not for it to reap.
            _adopt_orphans(self._adopted_before)
        _reap_left(self._sessions)
        self._sessions.clear()

    def _fail(self, problem: str) -> None:
        """There is none now. ``open`` tries again, but not for ever: what cannot be imported cannot be imported."""
        self.problem = problem
        self._num_failed += 1
        self._end_cradle()

    def _end_cradle(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        if self._line is not None:
            self._line.close()
        self._process, self._line, self._is_ready = None, None, False


def _wait_for(descriptors: Sequence[int], seconds: float) -> set[int]:
    """Which of some descriptors can be read, as soon as one can; none after that time."""
    # Not select: that knows no descriptor above 1023.
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in waiting.poll(seconds * 1000)}


def _reap_left(sessions: set[int]) -> None:
    """Wait for what ranks had started and left behind: dead by now, and this process's since it was an orphan's parent.

    Not for the ranks themselves, whose ends others wait for.
    """
    for pid in _children():
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if words[0] == "Z" and int(words[3]) in sessions and pid not in sessions:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _adopts_orphans() -> bool | None:
    """Whether the kernel makes this process the parent of its orphaned descendants; None where it cannot."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return None
    answer = ctypes.c_int(0)
    failed = ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return None if failed else bool(answer.value)


def _adopt_orphans(wanted: bool) -> bool:
    """Ask the kernel to make, or not to make, this process that parent; False when it does not."""
    return int(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted), 0, 0, 0)) == 0
