"""The loss curve of ``recipes/tiny.toml`` is what it was. A change here is a change of numerics and belongs in the changelog."""

import tomllib
from pathlib import Path

import torch

from shoal.testing.golden import check_golden
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from support.processes.command import ROOT

HERE = Path(__file__).parent


def test_the_first_losses_of_the_tiny_recipe(tmp_path):
    # The text itself differs between versions of Python, so the golden curve is over tokens that are made from the seed.
    tables = tomllib.loads((ROOT / "recipes" / "tiny.toml").read_text())
    tables["data"] = {"source": "synthetic", "kind": "tokens", "sequence": 32, "samples": 512, "vocab": 64}
    tables["train"]["steps"] = 12
    recipe = Recipe.model_validate(tables)
    torch.set_num_threads(1)
    model, loss, data = build_parts(recipe)
    with Trainer(model, data, loss=loss, train=recipe.train, optim=recipe.optim, environment={}) as trainer:
        losses = [info.loss for info in trainer.training_steps()]
    check_golden(HERE / "tiny.json", losses, relative=1e-4)
