"""Leftovers are made for real: a rank whose supervisor was killed, saves that stopped, locks and segments of the dead."""

import contextlib
import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.doctor.checks import State
from shoal.doctor.leftovers import Kind, Leftover, Saves, find_leftovers, mend, run_is_live
from shoal.doctor.processes import is_alive, our_processes
from shoal.doctor.report import examine_leftovers
from shoal.launch.jobdirectory import JobDirectory

# Starts a rank that waits for ever, says its pid, and waits to be killed.
SUPERVISOR = """
import os, subprocess, sys
environment = {**os.environ, "TORCHELASTIC_RUN_ID": "run-of-the-test", "SHOAL_SUPERVISOR_PID": str(os.getpid()),
               "SHOAL_RUN_DIR": sys.argv[1]}
wait = "import sys; print('up', flush=True); sys.stdin.read()"
rank = subprocess.Popen([sys.executable, "-c", wait], env=environment, start_new_session=True,
                        stdin=int(sys.argv[2]), stdout=subprocess.PIPE, pass_fds=[int(sys.argv[2])])
assert rank.stdout.readline() == b"up\\n"
print(rank.pid, flush=True)
sys.stdin.read()
"""


# A job's folder with something in it, held until this is killed.
JOB_PROCESS = """
import sys
from pathlib import Path
from shoal.launch.jobdirectory import JobDirectory
folder = JobDirectory(Path(sys.argv[1]))
(folder.path / "arena").write_bytes(bytes(1000))
print(folder.path, flush=True)
sys.stdin.read()
"""


def sweep_for_test(root: Path) -> list[str]:
    said = []
    for path in root.iterdir():
        if path.name.startswith(".tmp-"):
            path.rmdir()
            said.append(f"removed {path.name}")
    return said


SAVES = Saves(is_leftover=lambda name: name.startswith(".tmp-"), sweep=sweep_for_test)


@contextlib.contextmanager
def supervised_rank(run: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A supervisor and its rank, both real; whatever is left of them afterwards is ended."""
    # The rank reads a pipe that only this process holds open: if the test dies, so does the rank.
    read_end, write_end = os.pipe()
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(run), str(read_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[read_end],
        text=True,
    )
    os.close(read_end)
    try:
        yield supervisor, int(supervisor.stdout.readline())
    finally:
        os.close(write_end)
        supervisor.kill()
        supervisor.communicate()


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def kinds(found) -> list[Kind]:
    return [leftover.kind for leftover in found]


def mine(pid: int):
    return [process for process in our_processes() if process.pid == pid]


@pytest.fixture
def run(tmp_path) -> Path:
    run = tmp_path / "runs" / "first"
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    return run


@pytest.fixture
def no_segments(tmp_path) -> Path:
    empty = tmp_path / "shm"
    empty.mkdir()
    return empty


def test_a_rank_is_an_orphan_once_its_supervisor_is_dead(run):
    with supervised_rank(run) as (supervisor, rank):
        (before,) = mine(rank)
        assert (before.run_id, before.supervisor_pid, before.is_orphan) == ("run-of-the-test", supervisor.pid, False)
        supervisor.kill()
        supervisor.wait()
        (after,) = mine(rank)
        assert after.is_orphan
        (leftover,) = find_leftovers(run, [after], SAVES, shared_memory=run / "none")
        assert leftover.kind is Kind.PROCESS and str(supervisor.pid) in leftover.why
        mended = mend(leftover, SAVES)
        assert mended.done and str(rank) in mended.said
        assert not is_alive(rank)


def test_a_supervisor_that_nobody_waited_for_is_dead_too(run):
    with supervised_rank(run) as (supervisor, rank):
        supervisor.kill()
        # Not waited for, so it is a zombie: its pid exists and it will never do anything again.
        os.waitid(os.P_PID, supervisor.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.pid_exists(supervisor.pid)
        assert mine(rank)[0].is_orphan


def test_a_pid_that_was_used_again_is_left_alone(run):
    with supervised_rank(run) as (_, rank):
        leftover = Leftover(
            kind=Kind.PROCESS, what="", why="", pid=rank, started=psutil.Process(rank).create_time() - 10
        )
        ended = os.pidfd_open(rank)
        assert mend(leftover, SAVES).done
        # A kill takes effect a moment later, so a look at once would miss it; this waits for an end that must not come.
        assert select.select([ended], [], [], 0.5)[0] == []
        os.close(ended)


def test_this_process_and_its_parents_are_never_ours_to_end():
    code = (
        "import os; from shoal.doctor.processes import our_processes; "
        "print(os.getpid() in {process.pid for process in our_processes()})"
    )
    environment = {**os.environ, "SHOAL_RUN_ID": "x", "SHOAL_SUPERVISOR_PID": str(dead_pid())}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "False"


def test_a_process_without_a_supervisor_is_not_ours():
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "torchrun's"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE)
    try:
        assert mine(process.pid) == []
    finally:
        process.kill()
        process.communicate()


def test_an_abandoned_save_of_a_dead_run_is_swept(run, no_segments):
    draft = run / "checkpoints" / ".tmp-step-00000020-0011223344556677"
    draft.mkdir()
    found = find_leftovers(run.parent, [], SAVES, shared_memory=no_segments)
    assert kinds(found) == [Kind.CHECKPOINT] and draft.name in found[0].what
    mended = mend(found[0], SAVES)
    assert mended.done and draft.name in mended.said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000010"]
    assert not (run / "run.lock").exists()


def test_a_run_can_be_named_itself(run, no_segments):
    (run / "checkpoints" / ".tmp-x").mkdir()
    assert kinds(find_leftovers(run, [], SAVES, shared_memory=no_segments)) == [Kind.CHECKPOINT]


def test_a_save_in_a_locked_run_is_left_alone(run, no_segments):
    draft = run / "checkpoints" / ".tmp-x"
    draft.mkdir()
    with (run / "run.lock").open("w") as lock:
        (leftover,) = find_leftovers(run.parent, [], SAVES, shared_memory=no_segments)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_is_live(run, [])
        assert find_leftovers(run.parent, [], SAVES, shared_memory=no_segments) == ()
        # The run was started between the look and the touch.
        assert not mend(leftover, SAVES).done
        assert draft.exists() and (run / "run.lock").exists()


def test_a_save_of_a_run_whose_rank_still_lives_is_left_alone(run, no_segments):
    (run / "checkpoints" / ".tmp-x").mkdir()
    with supervised_rank(run) as (_, rank):
        assert kinds(find_leftovers(run.parent, mine(rank), SAVES, shared_memory=no_segments)) == []


def test_what_cannot_be_removed_is_said(run, no_segments):
    (run / "checkpoints" / ".tmp-x" / "file").mkdir(parents=True)
    stubborn = Saves(is_leftover=SAVES.is_leftover, sweep=lambda root: [])
    (leftover,) = find_leftovers(run.parent, [], stubborn, shared_memory=no_segments)
    mended = mend(leftover, stubborn)
    assert not mended.done and "could not remove .tmp-x" in mended.said
    refused = mend(leftover, SAVES)
    assert not refused.done and "not empty" in refused.said


def test_a_lock_of_the_dead_is_removed(run, no_segments):
    lock = run / "run.lock"
    lock.write_text(f"{dead_pid()}\n")
    found = find_leftovers(run.parent, [], SAVES, shared_memory=no_segments)
    assert kinds(found) == [Kind.LOCK]
    assert mend(found[0], SAVES).done
    assert not lock.exists()


def test_a_lock_of_the_living_is_not(run, no_segments):
    lock = run / "run.lock"
    lock.write_text(f"{os.getpid()}\n")
    assert find_leftovers(run.parent, [], SAVES, shared_memory=no_segments) == ()


def test_a_lock_older_than_the_process_it_names_is_of_the_dead(run, no_segments):
    lock = run / "run.lock"
    lock.write_text(f"{os.getpid()}\n")
    long_ago = psutil.Process().create_time() - 100
    os.utime(lock, (long_ago, long_ago))
    assert kinds(find_leftovers(run.parent, [], SAVES, shared_memory=no_segments)) == [Kind.LOCK]


def test_a_lock_taken_since_is_left_alone(run, no_segments):
    lock = run / "run.lock"
    lock.write_text(f"{dead_pid()}\n")
    (leftover,) = find_leftovers(run.parent, [], SAVES, shared_memory=no_segments)
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not mend(leftover, SAVES).done
    assert lock.exists()


def test_segments_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    dead, living, foreign = f"torch_{dead_pid()}_123_0", f"torch_{os.getpid()}_123_0", "sem.something"
    for name in (dead, living, foreign):
        (tmp_path / name).write_bytes(b"x" * 2048)
    found = find_leftovers(tmp_path / "runs", [], SAVES, shared_memory=tmp_path)
    assert [leftover.path.name for leftover in found] == [dead]
    assert "2.0 KiB" in found[0].why
    assert mend(found[0], SAVES).done
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([foreign, living])


def test_a_segment_that_somebody_still_maps_is_left_alone(tmp_path):
    path = tmp_path / f"torch_{dead_pid()}_123_0"
    path.write_bytes(b"x")
    with path.open("rb"):
        assert find_leftovers(tmp_path / "runs", [], SAVES, shared_memory=tmp_path) == ()
    assert len(find_leftovers(tmp_path / "runs", [], SAVES, shared_memory=tmp_path)) == 1


def test_the_directory_of_a_job_is_a_leftover_once_the_job_was_killed(run, tmp_path):
    jobs = tmp_path / "memory"
    jobs.mkdir()
    job = subprocess.Popen(
        [sys.executable, "-c", JOB_PROCESS, str(jobs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        folder = Path(job.stdout.readline().strip())
        assert find_leftovers(run, [], SAVES, shared_memory=None, jobs=jobs) == ()
    finally:
        job.kill()
        job.communicate()

    (found,) = find_leftovers(run, [], SAVES, shared_memory=None, jobs=jobs)
    assert (found.kind, found.path) == (Kind.JOB, folder)
    assert "whose supervisor is dead" in found.why
    assert folder.is_dir(), "looking changes nothing"

    assert mend(found, SAVES).done
    assert not folder.exists()
    assert find_leftovers(run, [], SAVES, shared_memory=None, jobs=jobs) == ()


def test_the_directory_of_a_job_that_lives_is_never_removed(tmp_path):
    held = JobDirectory(tmp_path)
    try:
        stale = Leftover(kind=Kind.JOB, what="said to be dead", why="it is not", path=held.path)
        assert not mend(stale, SAVES).done
        assert held.path.is_dir()
    finally:
        held.remove()


def test_an_orphan_of_runs_elsewhere_is_neither_reported_nor_ended(run, tmp_path):
    (tmp_path / "other").mkdir()
    with supervised_rank(run) as (supervisor, rank):
        supervisor.kill()
        supervisor.wait()
        ended = os.pidfd_open(rank)
        (check,) = examine_leftovers(tmp_path / "other", SAVES, fix=True)
        assert check.state is State.OK
        assert select.select([ended], [], [], 0.5)[0] == []
        os.close(ended)
        # A look at the whole machine sees it. No test ever fixes the whole machine: runs of others may be on it.
        looked = examine_leftovers(tmp_path / "other", SAVES, whole_machine=True)
        assert rank in [found.values["pid"] for found in looked]


def test_the_doctor_ends_the_orphan_before_it_sweeps_what_the_orphan_kept(run):
    (run / "checkpoints" / ".tmp-x").mkdir()
    with supervised_rank(run) as (supervisor, rank):
        supervisor.kill()
        supervisor.wait()
        looked = examine_leftovers(run.parent, SAVES)
        assert [check.values["pid"] for check in looked] == [rank]
        assert all(check.state is State.WRONG and "--fix" in check.advice for check in looked)
        assert is_alive(rank) and (run / "checkpoints" / ".tmp-x").exists()
        fixed = examine_leftovers(run.parent, SAVES, fix=True)
        assert [check.state for check in fixed if check.values["pid"] == rank] == [State.FIXED]
        assert [check.state for check in fixed if check.values["kind"] == Kind.CHECKPOINT] == [State.FIXED]
        assert not is_alive(rank) and not (run / "checkpoints" / ".tmp-x").exists()


def test_runs_that_are_not_there_leave_nothing(tmp_path, no_segments):
    assert find_leftovers(tmp_path / "nowhere", [], SAVES, shared_memory=no_segments) == ()
