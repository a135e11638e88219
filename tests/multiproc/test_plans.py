"""Plans through the front door: what is refused before anything starts, and what goes wrong on one rank of a split model."""

import os
import signal

import pytest

from support.processes.command import ranks_of, read_summary, wait_for_step

POISONED = """
import os, torch

class Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan") if ctx.bad else grad, None

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 8)

    def forward(self, x):
        # Weights move at every step, so a sum of them that was not seen before is a new step.
        return self.second(Poison.apply(torch.relu(self.first(x)), self.training and is_third_step(x)))

seen = []

def is_third_step(x):
    if os.environ.get("RANK") != "1" or not torch.is_grad_enabled():
        return False
    key = float(x.detach().sum())
    if key not in seen:
        seen.append(key)
    return seen.index(key) >= 4

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def build():
    return Model()

def build_unsplittable():
    return torch.nn.Sequential(torch.nn.Conv1d(8, 4, 1), torch.nn.Flatten(), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
"""
OWN = (
    '[model]\nbuild = "mine:{build}"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\nfeatures = {features}\n'
    "classes = 2\n[train]\nsteps = 6\nglobal_batch = 8\n[telemetry]\ntensorboard = false\n"
)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("tp=3", ["tp=3", "4 heads", "nearest plan"]),
        ("tp=4", ["tp=4", "2 key-value heads", "nearest plan"]),
        ("cp=3", ["sequence of 16", "6", "nearest plan"]),
        ("dp=2 tp=2 --nproc 3", ["3 processes", "= 4"]),
        ("sp=true", ["sp=true", "tp is 1"]),
        ("dp=1 zero=2", ["zero=2", "dp=1"]),
        ("zero=5 dp=2", ["zero=5"]),
    ],
)
def test_a_plan_that_cannot_run_is_refused_with_its_numbers(shoal, tiny, plan, words):
    text, _, rest = plan.partition(" --")
    options = [f"--{rest.split()[0]}", rest.split()[1]] if rest else []
    ended = shoal.run("train", tiny, "--plan", text, "--run-dir", "never", *options, expect=2)
    for word in words:
        assert word in ended.stderr, ended.stderr
    assert not (shoal.folder / "never").exists()


def test_a_module_in_which_nothing_can_be_split_is_refused_before_any_process(shoal):
    (shoal.folder / "mine.py").write_text(POISONED)
    (shoal.folder / "own.toml").write_text(OWN.format(build="build_unsplittable", features="[8, 1]"))
    ended = shoal.run("train", "own.toml", "--plan", "tp=2", "--run-dir", "never", expect=2)
    assert "nothing to split" in ended.stderr and "parallel.split" in ended.stderr, ended.stderr
    assert not (shoal.folder / "never").exists()


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["tp=2", "dp=2 zero=3"])
def test_a_nan_on_one_rank_of_a_sharded_model_is_traced_to_it(shoal, plan):
    (shoal.folder / "mine.py").write_text(POISONED)
    (shoal.folder / "own.toml").write_text(OWN.format(build="build", features="[8]"))
    ended = shoal.run("train", "own.toml", "--plan", plan, "--run-dir", "run", expect=1)
    assert "is not finite on rank 1" in ended.stderr, ended.stderr
    assert read_summary(shoal.folder / "run")["status"] == "failed"


@pytest.mark.parametrize(
    "plan", ["tp=2 sp=true", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp=2 zero=3", "cp=2"))]
)
def test_a_killed_rank_of_a_split_model_is_named_and_nothing_hangs(shoal, tiny, plan):
    process = shoal.start("train", tiny, "--plan", plan, "--run-dir", "run", "--set", "train.steps=100000")
    wait_for_step(shoal.folder / "run", 2)
    os.kill(ranks_of(process)[1].pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rank 1" in stderr and "SIGKILL" in stderr, stderr
