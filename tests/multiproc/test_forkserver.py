"""Ranks that are forked from a process which has imported everything: children like any other, and nothing is left of them."""

import contextlib
import ctypes
import os
import signal

import psutil
import pytest

from shoal.launch import forkclient
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Process, Streams
from support.processes import warm
from support.processes.command import wait_until

PR_GET_CHILD_SUBREAPER = 37
OWN = ("forked_rank", "nothing.of.this.name")
"""What the servers of these tests preload; the session has others."""
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


@pytest.fixture(autouse=True)
def _interpreters(monkeypatch):
    """These servers are interpreters of their own, as those of a user are."""
    monkeypatch.setattr(forkclient, "start_interpreter", warm._start_interpreter)


@pytest.fixture
def client(tmp_path, monkeypatch):
    (tmp_path / "forked_rank.py").write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with contextlib.closing(ForkClient(["forked_rank"], environment)) as found:
        yield found


def start(client: ForkClient, *arguments: str, output=None, errors=None, descriptors=()) -> Process:
    environment = {**os.environ, "WHO": "rank 3", "SHOAL_SUPERVISOR_PID": str(os.getpid())}
    with open(os.devnull, "wb") as nowhere:
        streams = Streams(stdout=output or nowhere.fileno(), stderr=errors or nowhere.fileno())
        process = client.start(
            "forked_rank", arguments, environment=environment, streams=streams, descriptors=descriptors
        )
    assert process is not None
    return process


def servers() -> list[psutil.Process]:
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [
        child
        for child in alive
        if {"shoal.launch.forkserver", *OWN} & set(child.cmdline()) > {"shoal.launch.forkserver"}
    ]


def only_server() -> psutil.Process:
    # What was forked a moment ago looks like it until it has its own name.
    return wait_until(lambda: servers()[0] if len(servers()) == 1 else None, "one server")


def test_a_forked_rank_is_a_child_with_its_own_output_environment_and_exit_code(client, tmp_path) -> None:
    before = adopts_orphans()
    client.open()
    read, write = os.pipe()
    with (tmp_path / "out").open("wb") as output, (tmp_path / "err").open("wb") as errors:
        process = start(client, "tell", str(write), output=output.fileno(), errors=errors.fileno(), descriptors=[write])
    os.close(write)
    assert process.wait() == 7
    assert (tmp_path / "out").read_text() == "rank 3 True True\n" and (tmp_path / "err").read_text() == "wrong\n"
    assert os.read(read, 100) == b"inherited" and os.read(read, 1) == b""
    os.close(read)
    client.close()
    assert adopts_orphans() == before and servers() == []


def test_the_end_of_one_rank_is_not_lost_to_the_start_of_another(client) -> None:
    """A rank that had died and was not waited for yet was taken for what dead ranks leave behind when the next one was started:
    nobody heard of its end, and a run with parameter servers waited for it for ever."""
    client.open()
    first = start(client, "tell", "1")
    wait_until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE, "its end")
    second = start(client, "pause")
    assert first.wait() == 7
    second.kill()
    assert second.wait() == -signal.SIGKILL


def test_a_kill_is_seen_and_what_a_rank_had_started_is_not_left(client) -> None:
    client.open()
    process = start(client, "leave")
    rank = psutil.Process(process.pid)
    (left,) = wait_until(lambda: [child for child in rank.children() if child.name() == "sleep"], "its child")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, "it to die")
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


def test_orphans_of_anything_else_are_not_adopted(client) -> None:
    client.open()
    process = start(client, "pause")
    assert not adopts_orphans()
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_the_death_of_the_server_harms_no_rank_and_another_takes_its_place(client) -> None:
    client.open()
    process = start(client, "wait")
    server = only_server()
    server.kill()
    wait_until(lambda: server.status() == "zombie", "its death")
    with pytest.raises(AssertionError):
        start(client, "wait")
    client.open()
    other = start(client, "wait")
    assert not process.reap() and not other.reap()
    for one in (process, other):
        one.kill()
        assert one.wait() == -signal.SIGKILL


def test_what_cannot_be_imported_is_left_to_the_ranks_to_say() -> None:
    with contextlib.closing(ForkClient(["nothing.of.this.name"], os.environ)) as client:
        for _ in range(4):
            client.open()
            assert client.wait()
            streams = Streams(stdout=1, stderr=2)
            assert client.start("nothing.of.this.name", [], environment=os.environ, streams=streams) is None
        assert servers() == []


def test_a_server_that_does_not_get_ready_keeps_nobody_waiting(client) -> None:
    client.open()
    server = only_server()
    server.suspend()
    assert not client.is_ready
    client.close()
    assert client.is_ready and servers() == []


def test_a_server_that_hangs_while_it_imports_is_given_up_after_its_deadline(tmp_path, monkeypatch) -> None:
    """Who only looks whether it is ready, and does not wait, as an event loop does, looked for ever."""
    (tmp_path / "endless_import.py").write_text("import signal\nsignal.pause()\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    monkeypatch.setattr(forkclient, "_PRELOAD_SECONDS", 0.5)
    with contextlib.closing(ForkClient(["endless_import"], environment)) as client:
        client.open()
        assert not client.is_ready
        wait_until(lambda: client.is_ready, "the deadline")
        assert client.problem == "it died or hung while it imported"


def test_a_forked_process_may_have_no_output(client) -> None:
    client.open()
    process = client.start("forked_rank", ["pause"], environment=os.environ, streams=Streams())
    assert process is not None, client.problem
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_waiting_for_it_ends_when_something_else_happens(client) -> None:
    read, write = os.pipe()
    os.write(write, b"!")
    client.open()
    assert not client.wait(read)
    os.read(read, 1)
    assert client.wait(read)
    for descriptor in (read, write):
        os.close(descriptor)
