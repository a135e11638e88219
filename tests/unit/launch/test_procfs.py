"""What the kernel says about real processes."""

import os
import signal
import subprocess
import sys

from shoal.core.clock import Deadline
from shoal.launch.procfs import catches_signal, count_oom_kills, process_state, resident_bytes, total_memory_bytes


def test_state_of_a_stopped_process_and_of_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        deadline = Deadline(seconds=5)
        while process_state(child.pid) != "T":
            deadline.check("the process to stop")
    finally:
        child.kill()
        child.wait(timeout=10)
    assert process_state(child.pid) is None
    assert resident_bytes(child.pid) is None


def test_memory() -> None:
    mine = resident_bytes(os.getpid())
    total = total_memory_bytes()
    assert mine is not None
    assert total is not None
    assert 1 << 20 < mine < total


def test_kills_are_counted() -> None:
    count = count_oom_kills()
    assert count is not None
    assert count >= 0


def test_a_process_without_a_handler_is_known():
    body = "import signal, sys; {}; print('there', flush=True); sys.stdin.read()"
    for setup, catches in (("pass", False), ("signal.signal(signal.SIGUSR1, lambda *_: None)", True)):
        with subprocess.Popen(
            [sys.executable, "-c", body.format(setup)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "there\n"
            assert catches_signal(process.pid, signal.SIGUSR1) is catches
            process.stdin.close()
    assert catches_signal(process.pid, signal.SIGUSR1), "of one that is gone nothing is known"
