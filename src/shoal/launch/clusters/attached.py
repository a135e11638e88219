"""A launcher's own command, run to its end: its output shown, its word on failed processes read, signals passed on.

Ctrl-C reaches this process alone (the command has a session of its own), which asks the launcher once to end its processes in
order, and at a second Ctrl-C, or when they take longer than they may, to end them at once.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TextIO

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.launch.blame import name_signal
from shoal.launch.clusters.culprits import TaskEnd
from shoal.launch.forkclient import ForkClient
from shoal.launch.output import LineSplitter
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import KILL_SECONDS, Command, SignalInbox, Supervisor

_LOOK_SECONDS = 0.5
_READ_BYTES = 64 * 1024
_BETWEEN_SECONDS = 0.2
_SPARE_SECONDS = 10.0
"""What a launcher may take beyond its ranks' own grace."""


class EndReader(Protocol):
    """Reads what a launcher says of its processes."""

    def read(self, line: str) -> list[TaskEnd]:
        """The ends that a line tells of."""


@dataclass(frozen=True, kw_only=True)
class AttachedCommand:
    """A launcher's command."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    reader: EndReader
    stop_grace: float
    """Seconds that ranks have to save after they were asked to stop."""
    stop: int = signal.SIGUSR2
    """Handed on to the ranks, which save and end; srun and mpirun take SIGTERM and SIGINT for themselves, and kill."""
    abort: Sequence[int] = (signal.SIGTERM,)
    """By which the launcher ends its processes at once."""
    is_quiet: Callable[[str], bool] = lambda line: False
    """True for lines that are not shown: the launcher's own word on failures, which is told in other words."""


@dataclass(frozen=True, kw_only=True)
class AttachedEnd:
    """How it ended."""

    exit_code: int
    """Of the launcher; minus the signal that ended it."""
    stop_signal: int | None
    """That asked us to stop."""
    was_forced: bool
    ends: tuple[TaskEnd, ...]
    """Failed processes, in the order in which the launcher told of them."""


def run_attached(command: AttachedCommand) -> AttachedEnd:
    """Run it to its end.

    Raises:
        RunError: it could not be started, or this is not the main thread.
    """
    client = ForkClient([], command.environment)
    with SignalInbox() as inbox, contextlib.closing(client):
        return _Attached(command, client, inbox).run()


class _Attached:
    def __init__(self, command: AttachedCommand, client: ForkClient, inbox: SignalInbox) -> None:
        self._command = command
        self._inbox = inbox
        self._supervisor = Supervisor(client, environment=command.environment)
        self._ends: list[TaskEnd] = []
        self._stop_signal: int | None = None
        self._deadline: Deadline | None = None
        self._was_forced = False
        self._process: Process | None = None

    def run(self) -> AttachedEnd:
        """Start it, and stay."""
        pipes: list[int] = []
        try:
            process = self._process = self._start(pipes)
            self._supervisor.watch(self._inbox, self._take_signals)
            while process.is_running:
                self._supervisor.turn(_LOOK_SECONDS)
                self._mind_deadline()
            for descriptor in pipes:
                self._drain(descriptor)
        finally:
            self._supervisor.close()
            for descriptor in pipes:
                os.close(descriptor)
        assert process.exit_code is not None
        return AttachedEnd(
            exit_code=process.exit_code,
            stop_signal=self._stop_signal,
            was_forced=self._was_forced,
            ends=tuple(self._ends),
        )

    def _start(self, pipes: list[int]) -> Process:
        writers: list[int] = []
        self._readers: dict[int, Callable[[], bool]] = {}
        try:
            for stream in (sys.stdout, sys.stderr):
                reader, writer = os.pipe()
                pipes.append(reader)
                writers.append(writer)
                os.set_blocking(reader, False)
                self._readers[reader] = partial(self._read, reader, LineSplitter(), stream)
            streams = Streams(stdout=writers[0], stderr=writers[1])
            process = self._supervisor.start(
                Command(name=self._command.name, argv=[*_DIES_WITH_US, *self._command.argv]), streams
            )
        except OSError as error:
            raise RunError(f"cannot start {self._command.name}: {error}") from error
        finally:
            for writer in writers:
                os.close(writer)
        for reader, action in self._readers.items():
            self._supervisor.watch(reader, lambda action=action: action() and None)  # type: ignore[misc]
        return process

    def _read(self, descriptor: int, splitter: LineSplitter, stream: TextIO) -> bool:
        """Take what is there; False when no more will come, or nothing is there now."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        for line in splitter.feed(data) if data else splitter.finish():
            self._show(line.decode(errors="replace"), stream)
        if not data:
            self._supervisor.unwatch(descriptor)
        return bool(data)

    def _drain(self, descriptor: int) -> None:
        while self._supervisor.is_watched(descriptor) and self._readers[descriptor]():
            pass

    def _show(self, line: str, stream: TextIO) -> None:
        self._ends += self._command.reader.read(line)
        if self._command.is_quiet(line):
            return
        # Who reads it may have gone, as after `| head`; the run goes on.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=stream, flush=True)

    def _take_signals(self) -> None:
        assert self._process is not None
        for number in self._inbox.take():
            if self._stop_signal is None:
                self._stop_signal = number
                grace = self._command.stop_grace
                print(
                    f"{name_signal(number)}: asking {self._command.name} to end the run with a checkpoint, for at most "
                    f"{grace:g} s; another Ctrl-C stops at once",
                    file=sys.stderr,
                    flush=True,
                )
                self._deadline = Deadline(seconds=grace + _SPARE_SECONDS)
                self._process.send(self._command.stop)
            elif number == signal.SIGINT and not self._was_forced:
                print("stopping at once", file=sys.stderr, flush=True)
                self._abort()

    def _mind_deadline(self) -> None:
        if self._deadline is None or not self._deadline.is_over:
            return
        if not self._was_forced:
            self._abort()
        elif self._process is not None:
            self._process.kill()

    def _abort(self) -> None:
        assert self._process is not None
        self._was_forced = True
        self._deadline = Deadline(seconds=KILL_SECONDS)
        for number in self._command.abort:
            self._process.send(number)
            # Two signals of one kind at once are one: the launcher has to have taken the first.
            time.sleep(_BETWEEN_SECONDS)


_DIES_WITH_US = (sys.executable, "-m", "shoal.launch.clusters.tied")
