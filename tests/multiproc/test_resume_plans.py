"""Checkpoints move between plans: saved under one, loaded under another, the run goes on as if nothing had changed."""

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.reader import read
from shoal.core.plan import Plan
from shoal.testing.parity import compare
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

RECIPE = {
    "model": {"name": "gpt", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1},
    # An odd vocabulary: its padding must be in no checkpoint.
    "data": {"source": "synthetic", "kind": "tokens", "samples": 128, "sequence": 16, "vocab": 67},
    "train": {"steps": 6, "global_batch": 8, "seed": 3, "precision": "float64"},
    "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.5},
}
ALONE = "dp=2"
# (saved under, loaded under, how far the end may be from that of the run that was left alone)
MOVES = [
    ("dp=2", "dp=2 zero=3", 0.0),
    ("dp=2 zero=3", "dp=2 zero=1", 0.0),
    ("dp=2 zero=1", "dp=2 zero=2 recompute=full", 0.0),
    ("dp=2 zero=2", "tp=2", 1e-11),
    ("tp=2 sp=true", "dp=2 zero=3", 1e-11),
    ("tp=2", "cp=2", 1e-11),
    ("cp=2 cp_kind=alltoall", "tp=2 sp=true", 1e-11),
]


def train_on_ranks(world, folder, moves):
    def train(plan, name, steps, resume=False):
        recipe = Recipe.model_validate({**RECIPE, "train": {**RECIPE["train"], "steps": steps}})
        model, loss, data = build_parts(recipe)
        trainer = Trainer(
            model,
            data,
            loss=loss,
            train=recipe.train,
            optim=recipe.optim,
            checkpoint=CheckpointConfig(every=3),
            plan=Plan.parse(plan),
            run_dir=Path(folder) / name,
            resume=resume,
            world=world,
        )
        trainer.train()
        trainer.persistence.close()
        trainer.reporter.close()
        trainer.mesh.close()

    train(ALONE, "alone", 6)
    for saved_under, loaded_under in moves:
        name = f"{saved_under} to {loaded_under}"
        train(saved_under, name, 3)
        train(loaded_under, name, 6, resume=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("moves")
    run_on_ranks(train_on_ranks, 2, str(found), [move[:2] for move in MOVES], deadline_seconds=110.0)
    return found


def state(run_dir):
    tensors = read(run_dir / "checkpoints" / "step-00000006").tensors
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng/")}


@pytest.mark.parametrize(("saved_under", "loaded_under", "bound"), MOVES)
def test_the_end_is_that_of_the_run_that_was_left_alone(folder, saved_under, loaded_under, bound):
    alone, moved = state(folder / "alone"), state(folder / f"{saved_under} to {loaded_under}")
    assert alone.keys() == moved.keys() and any(name.startswith("optimizer/") for name in alone)
    assert moved["weights/embedding.weight"].shape == (67, 32)
    found = compare(alone, moved)
    if bound == 0.0:
        assert found.is_bitwise, found
    for name, theirs in alone.items():
        scale = float(theirs.double().norm()) or 1.0
        assert float((theirs.double() - moved[name].double()).norm()) <= bound * scale, name


def test_a_checkpoint_of_pieces_says_so(folder):
    manifest = read(folder / "tp=2 to cp=2" / "checkpoints" / "step-00000003").manifest
    assert len(manifest.tensors["weights/blocks.0.attention.query.weight"].pieces) == 2
    assert torch.tensor(manifest.tensors["weights/embedding.weight"].shape).tolist() == [67, 32]
