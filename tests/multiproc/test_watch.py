"""The watch in a run: what a replica computes with must be every replica's, also where each of them updates only a part of it."""

import torch

from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

RECIPE = {
    "model": {"name": "gpt", "layers": 1, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 16, "sequence": 8, "vocab": 17},
    "train": {"steps": 3, "global_batch": 4, "watch_every": 2},
}


def drift(world, plan):
    """Rank 1 spoils the weights that it gathered, not the rows that it updates."""
    recipe = Recipe.model_validate(RECIPE)
    model, loss, data = build_parts(recipe)
    trainer = Trainer(model, data, loss=loss, train=recipe.train, plan=Plan.parse(plan), world=world)
    publish = trainer.engine.reduction.publish

    def publish_wrong():
        publish()
        with torch.no_grad():
            next(iter(model.parameters())).view(-1)[:1].add_(world.rank)

    trainer.engine.reduction.publish = publish_wrong
    try:
        trainer.train()
    except RunError as error:
        return str(error)
    finally:
        trainer.reporter.close()
        trainer.mesh.close()
    return ""


def test_gathered_weights_that_part_stop_the_run():
    for message in run_on_ranks(drift, 2, "dp=2 zero=1"):
        assert "step 2" in message and "'gathered/" in message and "rank 0 and rank 1" in message
