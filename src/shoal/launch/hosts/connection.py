"""One host as the coordinator sees it: the remote shell that runs its agent, what it last said, and what is still to be sent."""

import contextlib
import os
import select
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.comm.store.messages import Messages, encode
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.launch.hosts.hostspec import HostSlots
from shoal.launch.hosts.messages import MAGIC, Hello, ToCoordinator
from shoal.launch.output import LineSplitter, clean
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import Command, Supervisor

AGENT = "shoal.launch.hosts.agent"
_MOST_NOISE = 256 * 1024
_READ_BYTES = 256 * 1024
_TAIL_LINES = 12
_DRAIN_SECONDS = 1.0


def remote_command(python: str) -> str:
    """What the remote shell runs: the agent, in this folder, with this process's search path; nothing that is secret."""
    path = os.environ.get("PYTHONPATH", "")
    # Relative parts mean another folder there.
    path = os.pathsep.join(os.path.abspath(part) for part in path.split(os.pathsep) if part)
    variables = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    return f"cd {shlex.quote(os.getcwd())} && {variables}exec {shlex.quote(python or sys.executable)} -m {AGENT}"


class Connection:
    """The line to the agent of one host.

    Args:
        host: its name, and how many ranks it runs.
        ranks: their numbers.
    """

    def __init__(self, host: HostSlots, ranks: Sequence[int]) -> None:
        self.host = host
        self.ranks = tuple(ranks)
        self.hello: Hello | None = None
        self.process: Process | None = None
        self.lost = ""
        """Why nothing more will come from there; empty while the line stands."""
        self.heard = time.monotonic()
        """When the last byte came."""
        self.clock_offset, self.round_trip = 0.0, float("inf")
        """How far its clock is ahead of this one's, and the round trip of the ping that was measured by."""
        self.agent_clock = -1.0
        """The agent's clock at its newest pong; below 0 before the first."""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """What the shell and the agent last wrote to their standard error."""
        self._messages = Messages(ToCoordinator)
        self._noise: bytes | None = b""
        self._errors = LineSplitter()
        self._outgoing = bytearray()
        self._descriptors: list[int] = []

    @property
    def name(self) -> str:
        """The host's."""
        return self.host.name

    @property
    def has_outgoing(self) -> bool:
        """True while something waits to be sent."""
        return bool(self._outgoing) and not self.lost

    def open(self, supervisor: Supervisor, shell: Sequence[str], python: str) -> None:
        """Start the agent; its first message is waited for by whoever turns the supervisor.

        Raises:
            OSError: the remote shell cannot be started.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            pipes = [os.pipe() for _ in range(3)]
            for index, (reading, writing) in enumerate(pipes):
                here, there = (writing, reading) if index == 0 else (reading, writing)
                theirs.callback(os.close, there)
                ours.callback(os.close, here)
                os.set_blocking(here, False)
            command = Command(name=f"host {self.name}", argv=[*shell, self.name, remote_command(python)])
            streams = Streams(stdin=pipes[0][0], stdout=pipes[1][1], stderr=pipes[2][1])
            self.process = supervisor.start(command, streams)
            ours.pop_all()
        self._descriptors = [pipes[0][1], pipes[1][0], pipes[2][0]]
        self.heard = time.monotonic()

    @property
    def reading(self) -> int:
        """Where its messages arrive."""
        return self._descriptors[1]

    @property
    def errors(self) -> int:
        """Where its standard error arrives."""
        return self._descriptors[2]

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, now or in a later ``flush``."""
        if not self.lost and self._descriptors:
            self._outgoing += encode(message)
            self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        try:
            while self._outgoing and not self.lost:
                sent = os.write(self._descriptors[0], self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            # How the shell ended says more, and is seen in a moment.
            self._outgoing.clear()
            self.tail.append(f"nothing more could be sent: {error}")

    def read(self) -> list[Any]:
        """The messages that have arrived.

        Raises:
            RunError: what came is no message.
            EOFError: nothing more will come.
        """
        try:
            data = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        if self._noise is not None:
            self._noise += data
            _before, found, data = self._noise.partition(MAGIC)
            if not found:
                if len(self._noise) > _MOST_NOISE:
                    raise RunError(f"it prints, and starts no agent: {clean(self._noise[:200])}")
                return []
            self._noise = None
        return self._messages.feed(data)

    def read_errors(self) -> bool:
        """Take what came on its standard error; False at its end."""
        try:
            data = os.read(self.errors, _READ_BYTES)
        except BlockingIOError:
            return True
        lines = self._errors.feed(data) if data else self._errors.finish()
        self.tail.extend(text for line in lines if (text := clean(line).strip()))
        return bool(data)

    def drain_errors(self) -> None:
        """Take what is there of its standard error, which may stay open after the shell has ended: ssh with ``ControlPersist``
        leaves a process behind that has it."""
        limit = Deadline(seconds=_DRAIN_SECONDS)
        while select.select([self.errors], [], [], 0.0)[0] and self.read_errors() and not limit.is_over:
            pass

    def describe_end(self) -> str:
        """What is known of the end of its shell."""
        noise = [clean(line) for line in (self._noise or b"").splitlines()[-3:]]
        said = "; ".join([*noise, *self.tail])
        code = None if self.process is None else self.process.exit_code
        how = "ended" if code is None else f"ended with exit code {code}" if code >= 0 else f"died of signal {-code}"
        return f"the remote shell {how}{': ' + said if said else ', without a word'}"

    def hang_up(self) -> None:
        """Close the line; the agent ends its ranks and itself when it sees that."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        self._outgoing.clear()
