"""One process that this one started: seen to end at once, waited for exactly once, and ended with all that it had started.

It leads a session of its own, so what it starts is in its process group. ``subprocess.Popen`` is not enough: it knows only what
it has started itself, not what a fork server has, and it waits for a process before anybody can end what that one left behind.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.clock import Deadline

_END_SECONDS, _LOOK_SECONDS = 10.0, 0.005
_CAN_LOOK = hasattr(os, "waitid")
"""The kernel says that a process has ended without making this one forget it."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Descriptors that become a process's standard ones; they stay the caller's to close."""

    stdin: int = subprocess.DEVNULL
    stdout: int = subprocess.DEVNULL
    stderr: int = subprocess.DEVNULL


class Process:
    """A child of this process that leads a session of its own.

    Args:
        pid: of the child.
        name: what messages call it.

    Raises:
        OSError: there is no descriptor left to watch it by; it was killed.
    """

    def __init__(self, pid: int, name: str = "") -> None:
        self.pid = pid
        self.name = name or f"process {pid}"
        self.started_at = time.monotonic()
        self.ended_at = 0.0
        """Wall-clock seconds; 0 while it runs."""
        self.exit_code: int | None = None
        """Minus the signal where it died of one; None while it runs."""
        self.signals_sent: set[int] = set()
        self.descriptor = -1
        """Can be read once the process has ended; -1 where the system has no such descriptor."""
        if hasattr(os, "pidfd_open"):
            try:
                self.descriptor = os.pidfd_open(pid)
            except OSError:
                # It must not run on with nobody to end it.
                self.kill()
                self.wait()
                raise

    @property
    def is_running(self) -> bool:
        """True until ``reap`` has seen its end."""
        return self.exit_code is None

    def peek(self) -> int | None:
        """Its exit code as soon as the kernel knows it; what it left running still runs. None while it runs, and where there is
        no way to look without waiting."""
        if self.is_running and _CAN_LOOK:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self.exit_code

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended. Its process id cannot be reused before ``reap`` has seen its end."""
        if self.is_running:
            self.signals_sent.add(number)
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and what it started in its session, unless it has ended."""
        if self.is_running:
            kill_group(self.pid)
            # One that was forked a moment ago may not lead a group of its own yet.
            self.send(signal.SIGKILL)

    def reap(self) -> bool:
        """Take its exit code if it has ended, and kill what it left running. False while it runs."""
        if self.is_running and (not _CAN_LOOK or self.peek() is not None):
            if _CAN_LOOK:
                kill_group(self.pid)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                self.exit_code, self.ended_at = os.waitstatus_to_exitcode(status), time.time()
                self._close()
        return not self.is_running

    def wait(self, seconds: float = _END_SECONDS) -> int:
        """Wait for its end; its exit code.

        Raises:
            TimeoutError: it goes on, though it may have been killed: a disk that does not answer holds a process.
        """
        limit = Deadline(seconds=seconds)
        while not self.reap():
            if limit.is_over:
                raise TimeoutError(f"{self.name} (process {self.pid}) did not end within {seconds:g} s")
            if self.descriptor >= 0:
                wait_readable([self.descriptor], limit.remaining)
            else:
                time.sleep(_LOOK_SECONDS)
        assert self.exit_code is not None
        return self.exit_code

    def _close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def start_program(
    argv: Sequence[str],
    *,
    name: str = "",
    environment: Mapping[str, str],
    streams: Streams,
    descriptors: Sequence[int] = (),
) -> Process:
    """Start a program in a session of its own, so that Ctrl-C in the terminal goes to this process alone.

    Args:
        argv: the command line.
        name: what messages call the process.
        environment: all of it.
        streams: its standard input, output and error.
        descriptors: open files that it finds under the same numbers.

    Raises:
        OSError: the system could not start it.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # As some programs leave it to those that they start. The kernel would forget how a child ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    started = subprocess.Popen(
        argv,
        env=environment,
        stdin=streams.stdin,
        stdout=streams.stdout,
        stderr=streams.stderr,
        start_new_session=True,
        pass_fds=descriptors,
    )
    # Its end is for ``Process`` to wait for.
    pid, started.returncode = started.pid, 0
    return Process(pid, name)


def kill_group(pid: int) -> None:
    """Kill what a process with a session of its own started there, and itself if it runs.

    To be called before its end is waited for: after that its number, if nobody is left in the group, may be somebody else's.
    """
    # Neither is an error: nobody is left, or only the dead leader is.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def wait_readable(descriptors: Sequence[int], seconds: float) -> set[int]:
    """Which descriptors can be read, as soon as one can; none after that time."""
    # Not select: that knows no descriptor above 1023.
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in waiting.poll(seconds * 1000)}
