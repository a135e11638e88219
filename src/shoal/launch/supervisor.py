"""A group of processes, started, watched and ended by one parent: the mechanism under ranks, parameter-server jobs and pools.

One selector and no thread. It starts processes, forked where there is a fork server, reads what they print, notices their ends at
once, and ends them without leftovers. Policy is the caller's: who is to blame (``blame.py``), who is started again, and when.

    supervisor = Supervisor(client, environment=..., descriptors=[board.fd])
    process = supervisor.start(Command(name="worker-0", module="my.module"), Streams(stdout=log, stderr=log))
    for ended in supervisor.turn(0.1):
        print(ended.name, ended.exit_code)
    supervisor.close()

An event loop of another kind watches ``fileno`` and calls ``turn(0)`` when it can be read.
"""

import contextlib
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Process, Streams, start_program

KILL_SECONDS = 10.0
"""How long the kernel may take to end what was killed."""
ORDER_FAIL, ORDER_KILL, ORDER_STACKS = 200, 201, 202
ORDERS = frozenset({ORDER_FAIL, ORDER_KILL, ORDER_STACKS})
"""What an inbox takes beside signals: ranks elsewhere have failed, kill all ranks, let them say where they are."""
_LOOK_SECONDS = 0.005


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those by which this process is asked to stop. Not SIGHUP under nohup, which means: live on when the terminal goes away."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


@dataclass(frozen=True, kw_only=True)
class Command:
    """What one process runs: a command line, or a module whose ``main`` is called."""

    name: str
    """What messages call the process."""
    argv: Sequence[str] = ()
    """Left out where a module is given."""
    module: str = ""
    arguments: Sequence[str] = ()
    """Of the module."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Put over that of the supervisor's processes."""
    is_forked: bool = True
    """False for a module that needs nothing of what the fork server has imported, and is sooner there by itself."""

    def __post_init__(self) -> None:
        """Refuse what would be started in two ways, or in none."""
        assert bool(self.argv) != bool(self.module), "give a command or a module"

    @property
    def line(self) -> list[str]:
        """What starts it as an interpreter of its own."""
        return list(self.argv) or [sys.executable, "-m", "shoal.launch.child", self.module, *self.arguments]


class Supervisor:
    """The processes of a group; to be used from the main thread, with which they die.

    Args:
        client: forks them where it can; it stays the caller's, and may outlive this.
        environment: of every process, all of it.
        descriptors: open files that every process finds under the same numbers.
    """

    def __init__(self, client: ForkClient, *, environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> None:
        self._client = client
        self._environment = dict(environment)
        self._descriptors = tuple(descriptors)
        self._selector = selectors.DefaultSelector()
        self._processes: dict[Process, int] = {}
        """Those that run, each with the descriptor that it is watched by."""

    @property
    def running(self) -> list[Process]:
        """The processes whose end was not seen yet, in the order of their starts."""
        return list(self._processes)

    def start(self, command: Command, streams: Streams) -> Process:
        """Start a process: forked, after the fork server is ready, or else as an interpreter of its own.

        Raises:
            OSError: the system could not start it.
        """
        environment = {**self._environment, **command.environment}
        process = None
        if command.module and command.is_forked:
            process = self._client.start(
                command.module,
                command.arguments,
                name=command.name,
                environment=environment,
                streams=streams,
                descriptors=self._descriptors,
            )
        process = process or start_program(
            command.line,
            name=command.name,
            environment=environment,
            streams=streams,
            descriptors=self._descriptors,
        )
        if process.descriptor >= 0:
            self._selector.register(process.descriptor, selectors.EVENT_READ)
        self._processes[process] = process.descriptor
        return process

    def watch(self, file: Any, action: Callable[[], None]) -> None:
        """Call an action in ``turn`` whenever a file can be read, until ``unwatch``."""
        self._selector.register(file, selectors.EVENT_READ, action)

    def unwatch(self, file: Any) -> None:
        """Forget a file, if it is watched."""
        if self.is_watched(file):
            self._selector.unregister(file)

    def is_watched(self, file: Any) -> bool:
        """True between ``watch`` and ``unwatch``."""
        return file in self._selector.get_map()

    def fileno(self) -> int:
        """Can be read when ``turn`` has something to do; on systems that tell of ends, which Linux does."""
        return self._selector.fileno()

    def turn(self, seconds: float) -> list[Process]:
        """Wait until something happens, but not longer than that; do what was asked for it, and return who has ended."""
        for key, _ in self._selector.select(max(seconds, 0.0)):
            # An earlier action of the same turn may have ended the watch.
            if key.data is not None and self.is_watched(key.fileobj):
                action: Callable[[], None] = key.data
                action()
        return [process for process in self.running if self._reap(process)]

    def kill(self, processes: Iterable[Process] | None = None) -> None:
        """Kill some processes, or all, with everything they started. Their ends are still to be seen by ``turn``."""
        for process in list(self._processes if processes is None else processes):
            process.kill()

    def end(self, processes: Iterable[Process] | None = None) -> list[Process]:
        """Kill some processes, or all, and wait for their ends; returns those that the kernel did not end in time."""
        ending = list(self._processes if processes is None else processes)
        self.kill(ending)
        limit = Deadline(seconds=KILL_SECONDS)
        while (left := [process for process in ending if not self._reap(process)]) and not limit.is_over:
            time.sleep(_LOOK_SECONDS)
        return left

    def close(self) -> None:
        """End every process."""
        self.end()
        self._selector.close()

    def _reap(self, process: Process) -> bool:
        if process.reap() and (descriptor := self._processes.pop(process, -1)) >= 0:
            self._selector.unregister(descriptor)
        return not process.is_running


class SignalInbox:
    """Catches SIGINT, SIGTERM and SIGHUP while it is open; what was installed before is put back afterwards.

    A signal becomes a byte on a socket: something to read in an event loop, instead of something that interrupts it anywhere.
    Nothing happens inside a handler, so no line of the supervisor is cut.
    """

    def __enter__(self) -> "SignalInbox":
        """Begin to catch.

        Raises:
            RunError: this is not the main thread, where alone Python takes signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RunError("ranks are started from the main thread: they die with the thread that started them")
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {}
        for number in stop_signals():
            self._previous[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """What a selector watches."""
        return self._reader.fileno()

    def post(self, number: int) -> None:
        """Put in a signal, or an order, as if it had been sent to this process. From any thread."""
        with contextlib.suppress(OSError):
            self._writer.send(bytes([number]))

    def take(self) -> list[int]:
        """The signals and orders that came since the last call, in order; those that are none of ours are left out."""
        try:
            return [number for number in self._reader.recv(4096) if number in self._previous or number in ORDERS]
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler has to exist for the wake-up byte to be written."""
