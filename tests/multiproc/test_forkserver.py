"""Ranks that are forked from a process which has imported everything: children like any other, and nothing is left of them."""

import contextlib
import ctypes
import os
import signal
import threading

import psutil
import pytest

from shoal.launch.forkclient import ForkClient, ForkedProcess, Streams
from support.processes.command import wait_until

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
    with contextlib.closing(ForkClient(["forked_rank"], environment)) as found:
        yield found


def start(nursery: ForkClient, *arguments: str, output=None, errors=None, descriptors=()) -> ForkedProcess:
    environment = {"WHO": "rank 3", "SHOAL_SUPERVISOR_PID": str(os.getpid())}
    with open(os.devnull, "wb") as nowhere:
        streams = Streams(stdout=output or nowhere.fileno(), stderr=errors or nowhere.fileno())
        process = nursery.start(
            "forked_rank", arguments, environment=environment, streams=streams, descriptors=descriptors
        )
    assert process is not None
    return process


def cradles() -> list[psutil.Process]:
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "shoal.launch.forkserver" in child.cmdline()]


def only_cradle() -> psutil.Process:
    # What was forked a moment ago looks like it until it has its own name.
    return wait_until(lambda: cradles()[0] if len(cradles()) == 1 else None, "one cradle")


def test_a_forked_rank_is_a_child_with_its_own_output_environment_and_exit_code(nursery, tmp_path) -> None:
    before = adopts_orphans()
    nursery.open()
    read, write = os.pipe()
    with (tmp_path / "out").open("wb") as output, (tmp_path / "err").open("wb") as errors:
        process = start(
            nursery, "tell", str(write), output=output.fileno(), errors=errors.fileno(), descriptors=[write]
        )
    os.close(write)
    assert process.wait() == 7
    assert (tmp_path / "out").read_text() == "rank 3 True True\n" and (tmp_path / "err").read_text() == "wrong\n"
    assert os.read(read, 100) == b"inherited" and os.read(read, 1) == b""
    os.close(read)
    nursery.close()
    assert adopts_orphans() == before and cradles() == []


def test_the_end_of_one_rank_is_not_lost_to_the_start_of_another(nursery) -> None:
    """A rank that had died and was not waited for yet was taken for what dead ranks leave behind when the next one was started:
    nobody heard of its end, and a run with parameter servers waited for it for ever."""
    nursery.open()
    first = start(nursery, "tell", "1")
    wait_until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE, "its end")
    second = start(nursery, "pause")
    assert first.wait() == 7
    second.kill()
    assert second.wait() == -signal.SIGKILL


def test_a_kill_is_seen_and_what_a_rank_had_started_is_not_left(nursery) -> None:
    nursery.open()
    process = start(nursery, "leave")
    rank = psutil.Process(process.pid)
    wait_until(lambda: [child for child in rank.children() if child.name() == "sleep"], "its child")
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    wait_until(
        lambda: all(child.status() == "zombie" for child in psutil.Process().children() if child.name() == "sleep"),
        "it to die",
    )
    nursery.close()
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


def test_the_death_of_the_cradle_harms_no_rank_and_another_takes_its_place(nursery) -> None:
    nursery.open()
    process = start(nursery, "wait")
    cradle = only_cradle()
    cradle.kill()
    wait_until(lambda: cradle.status() == "zombie", "its death")
    with pytest.raises(AssertionError):
        start(nursery, "wait")
    nursery.open()
    other = start(nursery, "wait")
    assert process.poll() is None and other.poll() is None
    for one in (process, other):
        one.kill()
        assert one.wait() == -signal.SIGKILL


def test_what_cannot_be_imported_is_left_to_the_ranks_to_say() -> None:
    with contextlib.closing(ForkClient(["nothing.of.this.name"], os.environ)) as nursery:
        for _ in range(4):
            nursery.open()
            assert nursery.wait()
            streams = Streams(stdout=1, stderr=2)
            assert nursery.start("nothing.of.this.name", [], environment={}, streams=streams) is None
        assert cradles() == []


def test_a_cradle_that_is_abandoned_keeps_nobody_waiting(nursery) -> None:
    nursery.open()
    cradle = only_cradle()
    cradle.suspend()
    found = []
    waiting = threading.Thread(target=lambda: found.append(nursery.wait()))
    waiting.start()
    nursery.abandon()
    waiting.join(timeout=30)
    assert found == [True] and cradles() == []


def test_waiting_for_it_ends_when_something_else_happens(nursery) -> None:
    read, write = os.pipe()
    os.write(write, b"!")
    nursery.open()
    assert not nursery.wait(read)
    os.read(read, 1)
    assert nursery.wait(read)
    for descriptor in (read, write):
        os.close(descriptor)
