"""Ranks that are forked from a process which has imported everything: children like any other, and nothing is left of them."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

import psutil
import pytest

from harness import wait_until
from shoal.elastic.nursery import ForkedProcess, Nursery

PR_GET_CHILD_SUBREAPER = 37
pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="orphans are adopted on Linux only")
RANK = """
import os, signal, subprocess, sys

def main():
    what = sys.argv[1]
    if what == "tell":
        print(os.environ["WHO"], os.getppid() == int(os.environ["SHOAL_SUPERVISOR_PID"]), os.getsid(0) == os.getpid())
        os.write(int(sys.argv[2]), b"inherited")
        print("wrong", file=sys.stderr)
        sys.exit(7)
    if what == "leave":
        subprocess.Popen(["sleep", "60"])
    signal.pause()
"""


def adopts_orphans() -> bool:
    answer = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0
    return bool(answer.value)


@pytest.fixture
def nursery(tmp_path, monkeypatch):
    (tmp_path / "forked_rank.py").write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with contextlib.closing(Nursery(["forked_rank"], environment)) as found:
        yield found


def start(nursery: Nursery, *arguments: str, descriptors=()) -> ForkedProcess:
    environment = {"WHO": "rank 3", "SHOAL_SUPERVISOR_PID": str(os.getpid())}
    process = nursery.start("forked_rank", arguments, environment=environment, descriptors=descriptors)
    assert process is not None
    return process


def test_a_forked_rank_is_a_child_with_its_own_output_environment_and_exit_code(nursery) -> None:
    before = adopts_orphans()
    nursery.open()
    read, write = os.pipe()
    process = start(nursery, "tell", str(write), descriptors=[write])
    os.close(write)
    assert process.stdout.read() == b"rank 3 True True\n" and process.stderr.read() == b"wrong\n"
    assert os.read(read, 100) == b"inherited" and os.read(read, 1) == b""
    os.close(read)
    process.communicate()
    assert process.returncode == 7
    nursery.close()
    assert adopts_orphans() == before
    # It was closed: whoever asks now starts interpreters.
    assert nursery.start("forked_rank", [], environment={}, descriptors=()) is None


def test_a_kill_is_seen_and_what_a_rank_had_started_is_not_left(nursery) -> None:
    nursery.open()
    process = start(nursery, "leave")
    rank = psutil.Process(process.pid)
    wait_until(lambda: [child for child in rank.children() if child.name() == "sleep"], "its child")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    wait_until(
        lambda: all(child.status() == "zombie" for child in psutil.Process().children() if child.name() == "sleep"),
        "it to die",
    )
    nursery.close()
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


def test_the_death_of_the_cradle_harms_no_rank_and_is_survived(nursery) -> None:
    nursery.open()
    process = start(nursery, "wait")
    cradle = next(child for child in psutil.Process().children() if "shoal.elastic.cradle" in child.cmdline())
    cradle.kill()
    wait_until(lambda: cradle.status() == "zombie", "its death")
    assert nursery.start("forked_rank", ["wait"], environment={}, descriptors=()) is None
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_a_module_that_cannot_be_imported_leaves_it_to_the_ranks_to_say_so(tmp_path: Path) -> None:
    with contextlib.closing(Nursery(["nothing.of.this.name"], os.environ)) as nursery:
        nursery.open()
        assert nursery.wait()
        assert nursery.start("nothing.of.this.name", [], environment={}, descriptors=()) is None


def test_waiting_for_it_ends_when_something_else_happens(nursery) -> None:
    read, write = os.pipe()
    os.write(write, b"!")
    nursery.open()
    assert not nursery.wait(read)
    os.read(read, 1)
    assert nursery.wait(read)
    for descriptor in (read, write):
        os.close(descriptor)
