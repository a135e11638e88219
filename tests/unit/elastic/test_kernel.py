"""What the kernel says about real processes."""

import os
import signal
import subprocess
import sys

from shoal.core.clock import Deadline
from shoal.elastic.kernel import count_oom_kills, process_state, resident_bytes, total_memory_bytes


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
