"""Ranks that read different data are refused; data that changes under a run, or between a run and its resumption, is too."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from shoal.checkpoint.config import CheckpointConfig
from shoal.comm.world import join_world
from shoal.core.errors import AgreedError, RequestError, RunError
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.config import TokensConfig
from shoal.data.sources.own import from_datasets
from shoal.engine.config import TrainConfig
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.loop import Trainer


class Rows(Dataset):
    """Rows of their number; by salt other ones, by noise never the same."""

    def __init__(self, size, salt=0.0, noise=None):
        self.size, self.salt, self.noise = size, salt, noise

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        drawn = self.noise() if self.noise is not None else 0.0
        return torch.full((4,), i / 100 + self.salt + drawn), torch.tensor([float(i % 3)])


def train(world, data, steps=4, run_dir=None, resume=False, plan="", between=None, **checkpoint):
    torch.manual_seed(1)
    trainer = Trainer(
        nn.Linear(4, 1) if data.file is None else nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)),
        data,
        loss=nn.functional.mse_loss if data.file is None else tokens_loss,
        train=TrainConfig(steps=steps, global_batch=8),
        checkpoint=CheckpointConfig(every=2, background=False, **checkpoint),
        plan=Plan.parse(plan or f"dp={world.size}"),
        run_dir=run_dir,
        resume=resume,
        world=world,
    )
    try:
        for done in trainer.training_steps():
            if between is not None:
                between(done.step)
    finally:
        # The world is used again.
        trainer.persistence.close()
        trainer.reporter.close()
    return trainer


def tokens_loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def refused(function, kind):
    try:
        function()
    except kind as error:
        return str(error)
    return ""


def compare_on_ranks(world):
    generator = np.random.default_rng()
    first = world.rank == 0
    return [
        refused(lambda: train(world, from_datasets(Rows(256 if first else 263))), RequestError),
        refused(lambda: train(world, from_datasets(Rows(64, salt=0.0 if first else 1.0))), RequestError),
        refused(lambda: train(world, from_datasets(Rows(64), validation=Rows(8 if first else 9))), RequestError),
        refused(lambda: train(world, from_datasets(Rows(64, noise=generator.random))), RequestError),
        # Half of the times it does nothing: a few reads may well show nothing on one rank.
        *(
            refused(
                lambda: train(world, from_datasets(Rows(64, noise=lambda: generator.random() < 0.5)), 1), RequestError
            )
            for _ in range(8)
        ),
        refused(lambda: train(world, from_datasets(Rows(64))), RequestError),
    ]


def test_ranks_with_other_data_are_refused_together():
    """Lengths of 256 and 263 trained to the end, with 63 samples read twice and 67 never."""
    found = run_on_ranks(compare_on_ranks, 2)
    assert found[0] == found[1], "all ranks raise the same"
    length, contents, validation, *fine = found[0]
    assert "the train split has 256 samples on rank 0 and 263 on rank 1; give every process the same data" in length
    assert "the 64 samples of the train split are not the same on rank 0 and on rank 1" in contents
    assert "the validation split has 8 samples on rank 0 and 9 on rank 1" in validation
    assert not any(fine)


def alone():
    return join_world(Place(), deadline_seconds=60.0)


def token_data(path):
    return build_splits(TokensConfig(path=str(path), sequence=8, vocab=50), 1)


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "ids.bin"
    (np.arange(4000, dtype=np.uint16) * 7 % 50).tofile(path)
    return path


def change_tokens(path, how):
    ids = np.fromfile(path, dtype=np.uint16)
    if how == "touched":
        os.utime(path, ns=(1, 1))
    elif how == "longer":
        with path.open("ab") as file:
            file.write(bytes(100))
    elif how == "shorter":
        os.truncate(path, 7000)
    elif how == "rewritten":
        with path.open("r+b") as file:
            file.seek(2002)
            file.write(bytes(2))
    elif how == "replaced":
        ((ids + 1) % 50).astype(np.uint16).tofile(path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("touched", None),
        ("longer", None),
        ("shorter", "had 8000 bytes when it was opened and is shorter now; no checkpoint was written"),
        ("rewritten", "was written to while this run reads it: the 449 samples of the train split are not the same"),
        ("replaced", None),
    ],
)
def test_a_token_file_is_looked_at_before_every_checkpoint(tokens, tmp_path, capsys, how, message):
    def change(step):
        if step == 2:
            change_tokens(tokens, how)

    with contextlib.nullcontext() if message is None else pytest.raises(RunError, match=message):
        train(alone(), token_data(tokens), run_dir=tmp_path / "run", between=change)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == (["step-00000002", "step-00000004"] if message is None else ["step-00000002"])
    assert ("another file now; this run goes on" in capsys.readouterr().err) == (how == "replaced")


@pytest.mark.parametrize("how", ["touched", "rewritten", "replaced", "longer"])
def test_a_run_goes_on_with_the_same_data_only(tokens, tmp_path, capsys, how):
    train(alone(), token_data(tokens), steps=2, run_dir=tmp_path / "run")
    change_tokens(tokens, how)
    if how == "touched":
        assert train(alone(), token_data(tokens), run_dir=tmp_path / "run", resume=True).progress.step == 4
        return
    with pytest.raises(
        AgreedError, match=r"other data: the (train split has|\d+ samples of the train split).*other_data=true"
    ):
        train(alone(), token_data(tokens), run_dir=tmp_path / "run", resume=True)
    went_on = train(alone(), token_data(tokens), run_dir=tmp_path / "run", resume=True, other_data=True)
    assert went_on.progress.step == 4
    assert "going on because of checkpoint.other_data" in capsys.readouterr().err


def test_a_position_behind_the_end_of_other_data_is_the_next_epoch(tmp_path):
    train(alone(), from_datasets(Rows(64)), steps=6, run_dir=tmp_path / "run")
    shorter = from_datasets(Rows(32))
    went_on = train(alone(), shorter, steps=7, run_dir=tmp_path / "run", resume=True, other_data=True)
    assert (went_on.progress.position.epoch, went_on.progress.position.offset) == (1, 8)


def test_another_validation_split_is_told_of_and_trained_with(tmp_path, capsys):
    train(alone(), from_datasets(Rows(64), validation=Rows(8)), steps=2, run_dir=tmp_path / "run")
    train(alone(), from_datasets(Rows(64), validation=Rows(9)), steps=3, run_dir=tmp_path / "run", resume=True)
    assert "the validation split has 8 samples in the checkpoint and 9 now; losses of" in capsys.readouterr().err


PARTS = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    size = 71 if "worker-1" in sys.argv else 64
    return {"train": TensorDataset(torch.arange(size * 3.0).view(size, 3), torch.arange(size) % 3)}

def net():
    return nn.Linear(3, 3)
"""


def test_a_worker_of_parameter_servers_with_other_data_is_not_let_in(shoal):
    (shoal.folder / "parts.py").write_text(PARTS)
    (shoal.folder / "own.toml").write_text(
        '[model]\nbuild = "parts:net"\n[data]\nbuild = "parts:data"\n[train]\nsteps = 4\nglobal_batch = 8\nthreads = 1\n'
    )
    done = shoal.run("train", "own.toml", "--plan", "ps=1 workers=2", "--run-dir", "run", expect=2)
    told = "the number of samples of the train split is 64 at the servers and 71 at worker-1"
    assert done.stderr.count(told) == 1, done.stderr


@pytest.mark.soak
def test_under_a_launcher_one_rank_tells_of_it(shoal):
    (shoal.folder / "parts.py").write_text(
        PARTS.replace('"worker-1" in sys.argv', '__import__("os").environ.get("RANK") == "1"')
    )
    (shoal.folder / "own.toml").write_text(
        '[model]\nbuild = "parts:net"\n[data]\nbuild = "parts:data"\n[train]\nsteps = 4\nglobal_batch = 8\nthreads = 1\n'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shoal", "train", "own.toml", "--run-dir", "run"]
    done = subprocess.run(command, cwd=shoal.folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert done.stderr.count("the train split has 64 samples on rank 0 and 71 on rank 1") == 1, done.stderr
