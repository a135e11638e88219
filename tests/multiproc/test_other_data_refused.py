"""To go on with other data is a wrong request: one message, nothing restarted, and what the run before left stays."""

import numpy as np
import pytest

from support.processes.command import read_summary

PARTS = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    factor = float(os.environ["FACTOR"])
    return TensorDataset(torch.arange(300.0).view(100, 3) * factor, torch.arange(100) % 3)

def net():
    return nn.Linear(3, 3)
"""
OWN = '[model]\nbuild = "parts:net"\n[data]\nbuild = "parts:data"\n[train]\nsteps = 2\nglobal_batch = 8\nthreads = 1\n'
TOKENS = """
[model]
name = "gpt"
layers = 1
hidden = 8
heads = 1
[data]
source = "tokens"
path = "ids.bin"
vocab = 50
sequence = 8
[train]
steps = 2
global_batch = 8
threads = 1
"""


def left_by(run):
    return {name: (run / name).read_bytes() for name in ("summary.json", "recipe.toml", "plan.json")}


@pytest.mark.parametrize("kind", [pytest.param("own", marks=pytest.mark.soak), "tokens"])
def test_other_data_is_a_wrong_request(shoal, kind):
    def write(factor):
        (np.arange(2000) * factor % 50).astype(np.uint16).tofile(shoal.folder / "ids.bin")
        return {"FACTOR": str(factor)}

    (shoal.folder / "parts.py").write_text(PARTS)
    (shoal.folder / "data.toml").write_text(OWN if kind == "own" else TOKENS)
    environment = write(1)
    shoal.run("train", "data.toml", "--run-dir", "run", environment=environment)
    before = left_by(shoal.folder / "run")
    environment = write(3)
    more = ("train", "data.toml", "--run-dir", "run", "--resume", "--set", "train.steps=4", "--max-restarts", "2")
    done = shoal.run(*more, environment=environment, expect=2)
    assert left_by(shoal.folder / "run") == before
    told = done.stderr.splitlines()[-1]
    assert told.startswith("error: cannot go on from run/checkpoints/step-00000002: it was trained on other data: the ")
    assert "samples of the train split are not the same in the checkpoint and now" in told
    assert told.endswith("use the same data, or set checkpoint.other_data=true to go on with this")
    assert "try:" not in done.stderr and "restart" not in done.stderr, done.stderr
    # Of the user's own data it is known before a process starts.
    assert ("run directory run" in done.stderr) == (kind == "tokens")
    if kind == "own":
        nothing_to_do = shoal.run("train", "data.toml", "--run-dir", "run", "--resume", environment=environment)
        assert "has completed its 2 steps" in nothing_to_do.stderr
        shoal.run(*more, "--set", "checkpoint.other_data=true", environment=environment)
        assert read_summary(shoal.folder / "run")["steps"] == 4
