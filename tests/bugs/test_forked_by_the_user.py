"""What the user's code forked outlived its run, or spoke for the rank.

A child that a model or a dataset forks has everything of its rank: the error report, the board, the loader's processes. One that
raised wrote the living rank's error report, so a later death of that rank was told with the wrong story; one that was let return
trained along. With parameter servers children were ended by nobody when the run was over. And the sockets of loader processes
lay in the temporary folder for ever when their rank was killed.
"""

import os
import signal

import pytest

from support.processes.command import ranks_of, read_summary, wait_for_step, wait_until
from support.processes.supervised_ranks import is_alive

MODEL = """
import os, sys, time, torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.calls = 0
    def forward(self, x):
        self.calls += self.training
        if self.calls == 2 and 'SHOAL_BOARD_FD' in os.environ:
            self.calls += 1
            child = os.fork()
            with open('children', 'a') as file:
                print(child or os.getpid(), file=file)
            CHILD
        return self.layer(x)
def build():
    return Model()
"""
RECIPE = """
[model]
build = "mine:build"
[data]
source = "synthetic"
kind = "classes"
samples = 64
features = [8]
classes = 2
[train]
steps = 5
global_batch = 8
threads = 1
[telemetry]
tensorboard = false
"""


@pytest.fixture
def plant(shoal):
    """Writes a model that forks in its second forward pass, and a recipe for it; ``child`` is what both do then."""

    def write(child):
        (shoal.folder / "mine.py").write_text(MODEL.replace("CHILD", child))
        (shoal.folder / "own.toml").write_text(RECIPE)

    return write


RAISES, RETURNS = "raise ValueError('of the child')", "pass"
SERVERS = "ps=1 workers=1"


@pytest.mark.parametrize(
    ("end", "plan"),
    [
        (RAISES, "dp=1"),
        (RETURNS, SERVERS),
        pytest.param(RAISES, SERVERS, marks=pytest.mark.soak),
        pytest.param(RETURNS, "dp=1", marks=pytest.mark.soak),
    ],
)
def test_a_fork_neither_reports_for_its_rank_nor_trains_along(shoal, plant, end, plan):
    plant(f"os.waitpid(child, 0) if child else None\n            if not child: {end}")
    shoal.run("train", "own.toml", "--plan", plan, "--run-dir", "run", "--set", "data.workers=1")
    assert not list((shoal.folder / "run" / "errors").glob("*.json"))
    log = "".join(path.read_text() for path in (shoal.folder / "run" / "logs").glob("*.log"))
    assert ("of the child" if end == RAISES else "that was let return into training") in log
    summary = read_summary(shoal.folder / "run")
    assert (summary["steps"], summary.get("deaths", 0)) == (5, 0)


def test_children_of_a_worker_end_with_the_run(shoal, plant):
    plant("time.sleep(100) if not child else None")
    shoal.run("train", "own.toml", "--plan", "ps=1 workers=2", "--run-dir", "run")
    children = {int(line) for line in (shoal.folder / "children").read_text().split()}
    assert children
    wait_until(lambda: not any(is_alive(pid) for pid in children), "the end of what workers forked", seconds=5)


def test_a_killed_rank_with_loaders_leaves_no_socket(shoal, tiny):
    folder = shoal.folder / "tmp"
    folder.mkdir()
    long = ("--set", "train.steps=100000", "--set", "data.workers=1")
    process = shoal.start(
        "train", tiny, "--plan", "dp=2", *long, "--run-dir", "run", environment={"TMPDIR": str(folder)}
    )
    wait_for_step(shoal.folder / "run", 2)
    os.kill(ranks_of(process)[1].pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert not list(folder.glob("pymp-*"))
