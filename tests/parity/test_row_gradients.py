"""``nn.Embedding(sparse=True)`` on two replicas: the bits of one process, and those of the embedding without it."""

import pytest

from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.engine.state import hash_weights
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

ROWS, WHOLE = ("support.models.custom_parts:build_rows", "support.models.custom_parts:build_bag")
CALLED = "support.models.custom_parts:build_called_rows"
# So few that rows repeat in a batch.
FEW = {"num_words": 20}


def train(world, build, plan):
    recipe = Recipe.model_validate(
        {
            "model": {"build": build, "args": FEW},
            "data": {"build": "support.models.custom_parts:build_words", "args": FEW},
            "train": {"steps": 4, "global_batch": 8, "threads": 1, "seed": 3},
            "optim": {"name": "adamw", "lr": 0.1, "clip": 0.5},
        }
    )
    model, loss, data = build_parts(recipe)
    how = {"world": world} if world is not None else {"environment": {}}
    trainer = Trainer(model, data, loss=loss, train=recipe.train, optim=recipe.optim, plan=Plan.parse(plan), **how)
    with trainer:
        trainer.train()
        return hash_weights(trainer.model)


@pytest.mark.parametrize("plan", ["dp=1", "dp=1 microbatches=2"])
def test_rows_of_a_call_are_refused_by_the_name_of_their_parameter(plan):
    """It ended in an operator that torch does not have for sparse tensors."""
    with pytest.raises(RunError, match=r"gradient of parameter 'embed\.weight' comes as rows.*sparse=False"):
        train(None, CALLED, plan)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=2"])
def test_ranks_refuse_rows_of_a_call_too(plan):
    with pytest.raises(Exception, match=r"gradient of parameter 'embed\.weight' comes as rows"):
        run_on_ranks(train, 2, CALLED, plan, deadline_seconds=60.0)


def test_replicas_add_rows_up_as_one_process_does():
    """It ended in the first backward pass: a sparse tensor has no bytes to be sent."""
    found = run_on_ranks(train, 2, ROWS, "dp=2", deadline_seconds=60.0)
    alone = train(None, ROWS, "dp=1 microbatches=2")
    assert [*found] == [alone, alone]
    assert train(None, WHOLE, "dp=1 microbatches=2") == alone
