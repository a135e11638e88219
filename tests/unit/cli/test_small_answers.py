"""Small answers that a new user stumbled over: each says what was asked, what is, and what to do."""

import pytest

PARTS = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    return TensorDataset(torch.arange(300.0).view(100, 3), torch.arange(100) % 3)

class Net(nn.Module):
    def __init__(self, leaves):
        super().__init__()
        self.used, self.spare, self.leaves, self.calls = nn.Linear(3, 3), nn.Linear(2, 2), leaves, 0
    def forward(self, x):
        self.calls += 1
        if self.leaves and self.calls > 8: sys.exit("giving up")
        return self.used(x)

def net(leaves=False): return Net(leaves)
"""
RECIPE = (
    '[model]\nbuild = "parts:net"\n[data]\nbuild = "parts:data"\n[train]\nsteps = 12\nglobal_batch = 8\nthreads = 1\n'
)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "own.toml").write_text(RECIPE)
    (tmp_path / "afile").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "recipe.toml").write_text("][")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--plan", ""], "--plan is empty; name a plan"),
        (["--run-dir", "dangling"], "dangling is a link to nowhere, which does not exist; use another --run-dir"),
        (["--run-dir", "afile/x"], "afile is a file, not a folder; use another --run-dir"),
        (["--run-dir", "/proc/foo"], "/proc/foo cannot be made or written to as a run directory"),
        (["--run-dir", "garbage"], "cannot be read: use another --run-dir"),
    ],
)
def test_a_request_that_cannot_be_is_told_with_its_fix(shoal, own, options, told):
    done = shoal("train", "own.toml", *options)
    assert done.returncode == 2 and told in done.stderr and "Errno" not in done.stderr, done.stderr


def test_all_parameters_without_a_gradient_are_named(shoal, own):
    done = shoal("train", "own.toml", "--plan", "dp=2", "--run-dir", "run")
    assert "parameters 'spare.bias', 'spare.weight' got no gradient" in done.stderr, done.stderr


def test_an_exit_of_the_model_is_one_line(shoal, own):
    done = shoal("train", "own.toml", "--set", "model.args.leaves=true", "--run-dir", "run")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"it left: something that it runs called sys.exit('giving up') ({own}/parts.py:" in done.stderr, done.stderr


def test_fewer_steps_than_were_made_are_mentioned(shoal, own):
    assert shoal("train", "own.toml", "--run-dir", "run").returncode == 0
    done = shoal("train", "own.toml", "--run-dir", "run", "--resume", "--set", "train.steps=5")
    assert "run has completed its 12 steps, and 5 were asked for; nothing to do" in done.stderr
