"""A group of processes is started, watched and ended without leftovers; signals are read instead of interrupting."""

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Process, Streams, wait_readable
from shoal.launch.supervisor import Command, SignalInbox, Supervisor

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def test_signals_are_taken_in_order_and_handlers_restored() -> None:
    before = [signal.getsignal(number) for number in ALL]
    fds = set(os.listdir("/proc/self/fd"))
    with SignalInbox() as inbox:
        assert inbox.take() == []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert inbox.take() == [15, 2, 1, 2]
    assert [signal.getsignal(number) for number in ALL] == before
    assert set(os.listdir("/proc/self/fd")) == fds
    assert signal.set_wakeup_fd(-1) == -1


def test_a_flood_of_signals_blocks_nothing() -> None:
    with SignalInbox() as inbox:
        for _ in range(5000):
            signal.raise_signal(signal.SIGTERM)
        assert set(inbox.take()) == {15}


def test_nohup_is_honoured() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            assert inbox.take() == []
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_are_refused() -> None:
    problems: list[str] = []

    def enter() -> None:
        with pytest.raises(RunError) as caught, SignalInbox():
            pass
        problems.append(str(caught.value))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(timeout=5)
    assert "main thread" in problems[0]


# ---- a group of processes

SCRIPTS = {
    "wait": "import signal; signal.pause()",
    "end": "raise SystemExit(7)",
    "leave": "import subprocess; subprocess.Popen(['sleep', '60']); print('left', flush=True)",
}


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    fds = set(os.listdir("/proc/self/fd"))
    group = Supervisor(ForkClient([], os.environ), environment=os.environ)
    yield group
    group.close()
    assert set(os.listdir("/proc/self/fd")) == fds


def start(supervisor: Supervisor, what: str, streams: Streams | None = None) -> Process:
    command = Command(name=what, argv=[sys.executable, "-c", SCRIPTS[what]])
    return supervisor.start(command, streams or Streams())


def turn_until_ended(supervisor: Supervisor, process: Process) -> None:
    limit = Deadline(seconds=20)
    while process not in supervisor.turn(0.5):
        assert not limit.is_over


def test_an_end_is_told_once_with_its_exit_code(supervisor: Supervisor) -> None:
    process, other = start(supervisor, "end"), start(supervisor, "wait")
    turn_until_ended(supervisor, process)
    assert (process.exit_code, process.is_running, supervisor.running) == (7, False, [other])
    assert supervisor.turn(0) == []
    process.kill()  # Nobody is there any more, and whoever has its number now is not hit.
    assert process.signals_sent == set()


def test_an_end_is_told_where_the_parent_left_the_ends_of_children_ignored(supervisor: Supervisor) -> None:
    """``trap '' CHLD`` in a script was enough: the supervisor died of the first end of a rank."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = start(supervisor, "end")
        turn_until_ended(supervisor, process)
        assert process.exit_code == 7
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_those_that_are_ended_are_no_news(supervisor: Supervisor) -> None:
    first, second = start(supervisor, "wait"), start(supervisor, "wait")
    assert supervisor.end([first]) == []
    assert (first.exit_code, first.signals_sent) == (-signal.SIGKILL, {signal.SIGKILL})
    assert supervisor.turn(0) == [] and supervisor.running == [second]


def test_what_a_process_left_running_ends_with_it(supervisor: Supervisor) -> None:
    read, write = os.pipe()
    process = start(supervisor, "leave", Streams(stdout=write))
    os.close(write)
    seen: list[bytes] = []
    supervisor.watch(read, lambda: seen.append(os.read(read, 100)))
    turn_until_ended(supervisor, process)
    limit = Deadline(seconds=20)
    # What it left had its output too, and the end of the pipe says that it is gone.
    while b"" not in seen and not limit.is_over:
        supervisor.turn(0.2)
    supervisor.unwatch(read)
    os.close(read)
    # One line, in one piece or in two.
    assert b"".join(seen) == b"left\n" and seen[-1] == b""


def test_another_event_loop_is_woken_by_an_end(supervisor: Supervisor) -> None:
    process = start(supervisor, "end")
    assert wait_readable([supervisor.fileno()], 20.0) == {supervisor.fileno()}
    assert supervisor.turn(0) == [process]
