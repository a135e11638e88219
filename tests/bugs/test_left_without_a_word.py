"""An unfinished run was called completed, with exit code 0.

The supervisor believed exit codes. A library that calls ``os._exit(0)`` in the middle of a step, on every rank, made a run of 12
of 40 steps a success; on one rank alone, the other rank was blamed, because it was the one that failed. With parameter servers
such a worker was taken for one that found no work left, and the run stood still for ever. SIGTERM to a single rank stopped all of
them, and the command exited with 0. Now a process has done its work when it has said so on the board, and not before.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from support.processes.command import ranks_of, read_summary, wait_for_step, wait_until

MODEL = """
import os, sys, torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        self.calls = 0
    def forward(self, x):
        self.calls += self.training
        is_rank = 'SHOAL_BOARD_FD' in os.environ and os.environ.get('RANK', '0') in WHO
        if self.calls == AT and is_rank and not os.path.exists('spared'):
            open('spared', 'w').close() if SPARED else None
            LEAVE
        return self.layer(x)
def build():
    return Model()
"""
RECIPE = """
plan = "dp=2"
[model]
build = "mine:build"
[data]
source = "synthetic"
kind = "classes"
samples = 64
features = [8]
classes = 2
[train]
steps = 9
global_batch = 8
threads = 1
[checkpoint]
every = 1
[telemetry]
tensorboard = false
"""


@pytest.fixture
def plant(shoal):
    """Writes a model that leaves in one of its forward passes, and a recipe for it."""

    def write(leave="os._exit(0)", who="01", spared=False, at=3):
        text = (
            MODEL.replace("LEAVE", leave)
            .replace("WHO", repr(who))
            .replace("SPARED", str(spared))
            .replace("AT", str(at))
        )
        (shoal.folder / "mine.py").write_text(text)
        (shoal.folder / "own.toml").write_text(RECIPE)

    return write


def story_of(done):
    return done.stderr[done.stderr.rindex("error:") :]


@pytest.mark.parametrize("who", ["01", "1", pytest.param("0", marks=pytest.mark.soak)])
def test_a_rank_that_leaves_with_0_is_the_culprit(shoal, plant, who):
    plant(who=who)
    done = shoal.run("train", "own.toml", "--run-dir", "run", expect=1)
    headline = story_of(done).splitlines()[0]
    # Of two that leave the first is named, and either may be that.
    named = re.match(
        r"error: rank (\d) failed at step 3 in phase 'forward': it left with exit code 0 before step 9, the last",
        headline,
    )
    assert named is not None and named[1] in who
    assert read_summary(shoal.folder / "run")["status"] == "failed"


@pytest.mark.soak
def test_one_that_leaves_is_started_again(shoal, plant):
    plant(who="1", spared=True)
    done = shoal.run("train", "own.toml", "--run-dir", "run", "--max-restarts", "1")
    assert "rank 1 failed" in done.stderr and "0 restarts left" in done.stderr
    assert read_summary(shoal.folder / "run")["steps"] == 9


@pytest.mark.soak
def test_sys_exit_of_the_only_rank_is_told_with_its_place(shoal, plant):
    plant(who="0", leave="sys.exit(0)")
    done = shoal.run("train", "own.toml", "--plan", "dp=1", "--run-dir", "run", expect=1)
    assert "rank 0 failed at step 3 in phase 'forward': it left: something that it runs called sys.exit(0)" in story_of(
        done
    )
    assert "mine.py:13" in story_of(done)


def test_sigterm_to_one_rank_alone_is_no_success(shoal, tiny):
    long = ("--set", "train.steps=100000")
    process = shoal.start("train", tiny, "--plan", "dp=2", "--run-dir", "run", *long, "--json", "out.json")
    wait_for_step(shoal.folder / "run", 2)
    os.kill(ranks_of(process)[1].pid, signal.SIGTERM)
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert "stopped by SIGTERM to rank 1 alone" in stdout
    summary = read_summary(shoal.folder / "run")
    assert (summary["status"], summary["stopped_by"]) == ("interrupted", "SIGTERM to rank 1 alone")
    assert json.loads((shoal.folder / "out.json").read_text())["status"] == "interrupted"


def test_a_deadlock_is_told_with_its_stack_though_the_peer_gave_up_first(shoal, plant):
    """The peer's deadline expires before the supervisor looks: the one that hangs was ended without having been asked."""
    plant(who="1", leave="lock = __import__('threading').Lock(); lock.acquire(); lock.acquire()")
    done = shoal.run("train", "own.toml", "--run-dir", "run", "--set", "elastic.collective_deadline=2.0", expect=1)
    story = story_of(done)
    assert "rank 1 failed at step 3 in phase 'forward'" in story.splitlines()[0]
    assert 'mine.py", line 13 in forward' in story and "its stack is above" in story


def test_a_worker_that_leaves_is_replaced_and_told_of(shoal, plant):
    plant(spared=True)
    done = shoal.run("train", "own.toml", "--plan", "ps=1 workers=2", "--run-dir", "run")
    assert "died: it left with exit code 0 without having finished; it is started again" in done.stderr
    summary = read_summary(shoal.folder / "run")
    assert (summary["status"], summary["steps"], summary["deaths"]) == ("completed", 9, 1)


@pytest.mark.soak
def test_workers_that_always_leave_end_the_run(shoal, plant):
    plant(at=1)
    done = shoal.run("train", "own.toml", "--plan", "ps=1 workers=2", "--run-dir", "run", expect=1)
    told = story_of(done).splitlines()[0]
    assert "died 5 times in a row without a step between" in told and "it left with exit code 0" in told
    assert "its log: " in story_of(done) and "instance_id" not in story_of(done)
    assert read_summary(shoal.folder / "run")["status"] == "failed"


def test_a_rank_of_a_worker_that_leaves_is_the_culprit(shoal, plant):
    plant(leave="os._exit(0) if 'worker-0.1' in sys.argv else None", at=1)
    plan = "ps=1 workers=1 tp=2"
    done = shoal.run(
        "train", "own.toml", "--plan", plan, "--run-dir", "run", "--set", "paramserver.max_respawns=0", expect=1
    )
    assert "worker-0.1" in story_of(done).splitlines()[0] and "it left with exit code 0" in story_of(done)


def test_a_worker_that_hangs_in_its_first_unit_is_replaced(shoal, plant):
    """Nothing is usual yet, so it has no deadline of its own; the run stood still without a word."""
    plant(leave="lock = __import__('threading').Lock(); lock.acquire(); lock.acquire()", spared=True, at=1)
    deadline = ("--set", "elastic.collective_deadline=4.0")
    done = shoal.run("train", "own.toml", "--plan", "ps=1 workers=2", "--run-dir", "run", *deadline)
    assert "is killed: it runs but has got no further for 4 s; look for its stacks in" in done.stderr
    logs = "".join(path.read_text() for path in (shoal.folder / "run" / "logs").glob("*.log"))
    assert 'mine.py", line 13 in forward' in logs
    summary = read_summary(shoal.folder / "run")
    assert (summary["status"], summary["steps"]) == ("completed", 9)


@pytest.mark.soak
def test_a_server_that_is_stopped_and_has_no_backup_is_replaced(shoal, plant):
    plant(leave="pass")
    long = ("--set", "elastic.heartbeat_deadline=2.0", "--set", "train.steps=100000", "--set", "checkpoint.every=0")
    process = shoal.start("train", "own.toml", "--plan", "ps=1 workers=1", "--run-dir", "run", *long)

    def servers():
        alive = [child for child in psutil.Process(process.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
        with contextlib.suppress(psutil.Error):
            return [child for child in alive if "server-0" in child.cmdline()]
        return []  # One ended meanwhile.

    wait_for_step(shoal.folder / "run", 2)
    (stopped,) = servers()
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: any(other != stopped for other in servers()), "another server")
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert f"server-0 (process {stopped.pid}) is killed: no sign of life for" in stderr
    assert "(deadline 2 s); the process is stopped" in stderr
    assert process.returncode == 143


@pytest.mark.soak
def test_a_server_that_always_leaves_ends_the_run(shoal, plant):
    plant(at=0)
    with (shoal.folder / "mine.py").open("a") as file:
        file.write("    \nos._exit(0) if 'server-0' in sys.argv else None\n")
    done = shoal.run("train", "own.toml", "--plan", "ps=1 workers=1", "--run-dir", "run", expect=1)
    assert "server-0 died 5 times" in story_of(done) and "it left with exit code 0" in story_of(done)


def test_a_command_whose_own_process_is_left_is_no_success(shoal, plant):
    """A run is evaluated, and a request checked, in the process of the command itself, where no supervisor looks."""
    plant(leave="pass")
    shoal.run("train", "own.toml", "--plan", "dp=1", "--run-dir", "run", "--set", "train.steps=1")
    for number, leave in enumerate(("os._exit(0)", "sys.exit(0)")):
        plant(leave=leave, at=0)
        text = (shoal.folder / "mine.py").read_text().replace("'SHOAL_BOARD_FD' in os.environ and ", "")
        # Of two files of one length in one second Python takes what it compiled of the first for both.
        (shoal.folder / "mine.py").write_text(text + "\n" * number)
        done = shoal.run("eval", "run", "--samples", "8", expect=1)
        assert f"mine.py:13 called {leave} before the command was done" in done.stderr and not done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)"])
def test_ranks_of_a_launcher_that_leave_are_no_success(shoal, plant, leave):
    plant(leave=leave)
    text = (shoal.folder / "mine.py").read_text()
    (shoal.folder / "mine.py").write_text(text.replace("'SHOAL_BOARD_FD' in os.environ and ", ""))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal"]
    done = subprocess.run(
        [*command, "train", "own.toml", "--run-dir", "run"],
        cwd=shoal.folder,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1
    assert ("mine.py:13 called os._exit(0)" if "os" in leave else "failed at step 3 in phase 'forward'") in done.stderr


@pytest.mark.soak
def test_the_last_evaluation_that_leaves_is_told(shoal, plant):
    plant(leave="os._exit(0) if '--evaluate' in sys.argv else None", at=0)
    more = ("--plan", "ps=1 workers=1", "--set", "data.validation=0.2")
    done = shoal.run("train", "own.toml", "--run-dir", "run", *more, expect=1)
    assert "the process that evaluates the last checkpoint left with exit code 0" in story_of(done)
    assert read_summary(shoal.folder / "run")["status"] == "failed"
