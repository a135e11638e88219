"""A child that asked for it dies with its parent, also when the parent was gone before it asked."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from shoal.core.clock import Deadline

CHILD = """
import os, sys, time
from pathlib import Path
from shoal.comm.parentdeath import die_with_parent
die_with_parent(int(sys.argv[2]) if sys.argv[2] else None)
beside = Path(sys.argv[1] + ".tmp")
beside.write_text(str(os.getpid()))
beside.rename(sys.argv[1])
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], str(os.getpid())])
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(ready)])
    deadline = Deadline(seconds=20)
    while not ready.exists():
        deadline.check("the child")
        time.sleep(0.01)
    child = int(ready.read_text())
    assert is_alive(child)
    parent.kill()
    parent.wait(timeout=10)
    deadline = Deadline(seconds=2)
    while is_alive(child):
        deadline.check("the child's end")
        time.sleep(0.01)


def test_child_of_a_parent_that_is_already_gone_dies(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=20)
    ready = tmp_path / "ready"
    child = subprocess.run([sys.executable, "-c", CHILD, str(ready), str(gone.pid)], timeout=20)
    assert child.returncode == -signal.SIGKILL
    assert not ready.exists()


def test_without_an_expected_parent_the_present_one_counts(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = CHILD.replace("time.sleep(60)", "")
    child = subprocess.run([sys.executable, "-c", code, str(ready), ""], timeout=20)
    assert child.returncode == 0
    assert ready.exists()
    assert os.getpid() != int(ready.read_text())
