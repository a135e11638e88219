"""Laws between plans: an average at every step is all-reduce, a complete graph is averaging, a codec that never begins is none."""

import torch

from shoal.core.plan import Plan
from shoal.testing.parity import compare
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

RECIPE = {
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2, "dropout": 0.1},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 48, "sequence": 8, "vocab": 97},
    "train": {"steps": 5, "global_batch": 8},
    "optim": {"name": "sgd", "lr": 0.3, "weight_decay": 0.01},
    "compression": {"min_elements": 256},
}
PLANS = (
    "dp=2",
    "dp=2 sync=local:1",
    "dp=2 sync=gossip:complete",
    "dp=2 compress=none",
    "dp=2 compress=int8@5",
    "dp=2 compress=int8@4",
)


def train_on_ranks(world, plans):
    """By plan, the weights after the last step."""
    found = {}
    for text in plans:
        recipe = Recipe.model_validate(RECIPE)
        model, loss, data = build_parts(recipe)
        trainer = Trainer(
            model,
            data,
            loss=loss,
            train=recipe.train,
            optim=recipe.optim,
            compression=recipe.compression,
            plan=Plan.parse(text),
            world=world,
        )
        for _ in trainer.training_steps():
            pass
        found[text] = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        # Not the trainer, which would close the world.
        trainer.engine.close()
        trainer.reporter.close()
    return found


def test_plans_that_are_the_same_by_a_law_end_in_the_same_weights():
    found = run_on_ranks(train_on_ranks, 2, list(PLANS), deadline_seconds=120.0)
    first, other = ({plan: dict(weights) for plan, weights in one.items()} for one in found)
    summed = first["dp=2"]
    for plan in PLANS:
        assert all(torch.equal(first[plan][name], other[plan][name]) for name in summed), plan
    for plan in ("dp=2 compress=none", "dp=2 compress=int8@5"):
        assert compare(summed, first[plan]).is_bitwise, plan
    assert not compare(summed, first["dp=2 compress=int8@4"]).is_bitwise
    # The mean of steps is the step by the mean, but for rounding: half of each island's own mean loss is its share of the mean.
    for plan in ("dp=2 sync=local:1", "dp=2 sync=gossip:complete"):
        for name, weight in summed.items():
            assert float((first[plan][name] - weight).norm()) <= 1e-6 * float(weight.norm()), (plan, name)


def test_no_codec_is_written_as_one_that_is_left_out():
    assert Plan.parse("dp=2 compress=none") == Plan.parse("dp=2") and str(Plan.parse("dp=2 compress=none")) == "dp=2"
