"""Signals are read instead of interrupting, and what was installed before comes back."""

import os
import signal
import threading

import pytest

from shoal.core.errors import RunError
from shoal.launch.supervisor import SignalInbox

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
