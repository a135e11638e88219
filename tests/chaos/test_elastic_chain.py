"""A run that goes on with another number of processes again and again: 2, 3, 1, 2. Every sample is trained on when it would have
been in one process, none twice and none never in an epoch, and losses are those of the run that was left alone.

Replicas add the same numbers in another order, so losses agree to 1e-12 in float64 and to 1e-6 in float32. Which samples a
process trained on is written down by the model, from the samples themselves.
"""

from pathlib import Path

import numpy as np
import pytest

from shoal.comm.world import join_world
from shoal.core.place import Place
from shoal.trainer.build import build_trainer
from shoal.trainer.config import load_recipe
from support.processes.command import read_events

SAMPLES, BATCH, STEPS_PER_EPOCH = 50, 12, 5  # the last batch of an epoch has 2 samples: of three replicas one has none
CHAIN = ((2, 4), (3, 8), (1, 11), (2, 15))
"""Processes, and the step that they train up to."""
PARTS = """
import os
import torch
from torch import nn
from torch.utils.data import Dataset

class Numbered(Dataset):
    '''Rows that begin with their number.'''
    def __len__(self):
        return 50
    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        row = torch.randn(6, generator=generator, dtype=torch.float64)
        return torch.cat((torch.tensor([float(i)]), row)), torch.randn(2, generator=generator, dtype=torch.float64)

class Noting(nn.Sequential):
    '''Writes down what it is trained on: a line of numbers for every pass, in a file for every process.'''
    def forward(self, rows):
        if self.training and torch.is_grad_enabled() and "NOTES" in os.environ:
            with open(os.environ["NOTES"] + "-" + os.environ.get("RANK", "before"), "a") as notes:
                print(*rows[:, 0].int().tolist(), file=notes)
        return super().forward(rows[:, 1:])

def data():
    return {"train": Numbered()}

def net():
    return Noting(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
"""
RECIPE = """
[model]
build = "noting_parts:net"
[data]
build = "noting_parts:data"
[train]
steps = 15
global_batch = 12
threads = 1
precision = "{precision}"
[optim]
name = "adamw"
lr = 1e-2
clip = 1.0
[checkpoint]
background = false
[telemetry]
tensorboard = false
"""


@pytest.mark.soak
@pytest.mark.parametrize(("precision", "bound"), [("float64", 1e-12), ("float32", 1e-6)])
def test_two_three_one_two(shoal, tmp_path, monkeypatch, precision, bound):
    (tmp_path / "noting_parts.py").write_text(PARTS)
    (tmp_path / "own.toml").write_text(RECIPE.format(precision=precision))
    batches = train_alone(tmp_path, monkeypatch)
    for epoch in range(3):
        seen = np.concatenate(batches[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH])
        assert sorted(seen.tolist()) == list(range(SAMPLES)), "each once in an epoch"
    begin = 0
    for link, (ranks, end) in enumerate(CHAIN):
        goes_on = ("--resume",) if link else ()
        settings = ("--plan", f"dp={ranks}", "--set", f"train.steps={end}", "--run-dir", "chain", *goes_on)
        shoal.run("train", "own.toml", *settings, environment={"NOTES": str(tmp_path / f"link-{link}")})
        for rank in range(ranks):
            shares = [np.array_split(batch, ranks)[rank].tolist() for batch in batches[begin:end]]
            found = [batch.tolist() for batch in read_notes(tmp_path / f"link-{link}-{rank}")]
            assert found == [share for share in shares if share], f"rank {rank} of {ranks}, steps {begin + 1} to {end}"
        begin = end
    alone, chain = (read_events(tmp_path / run, 0, "step") for run in ("alone", "chain"))
    assert [event["step"] for event in chain] == [event["step"] for event in alone] == list(range(1, 16))
    assert [event["samples"] for event in chain] == [12, 12, 12, 12, 2] * 3
    for mine, theirs in zip(chain, alone, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=bound), f"step {mine['step']}"
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * bound), f"step {mine['step']}"


def train_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """What one process trains on, batch by batch, in this one."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("NOTES", str(folder / "alone-notes"))
    recipe, world = load_recipe(folder / "own.toml"), join_world(Place(), deadline_seconds=60.0)
    # One process needs nobody to decide its setup: dp is 1.
    with build_trainer(recipe, run_dir=folder / "alone", resume=False, world=world, rank_status=None) as trainer:
        trainer.train()
    monkeypatch.delenv("NOTES")
    return read_notes(folder / "alone-notes-before")


def read_notes(path: Path) -> list:
    return [np.array(line.split(), dtype=np.int64) for line in path.read_text().splitlines()]
