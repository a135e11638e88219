"""``shoal.Run`` in float16 against a recipe's trainer: the loss is scaled, overflows are left out, and every bit is the same."""

import pytest
import torch
from torch import nn

import shoal
from shoal.core.plan import Plan
from shoal.data.sources.own import from_datasets
from shoal.engine.config import TrainConfig
from shoal.engine.state import seed_for_build
from shoal.optim.config import OptimConfig
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.loop import Trainer

SEED, BATCH, STEPS = 3, 8, 14
PLANS = ("dp=2", "dp=2 zero=3")


def dataset():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, generator=generator), index % 3) for index in range(64)]


def build():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))


def steep(output, targets):
    """A loss whose gradient overflows float16 under the first scales."""
    return 300.0 * nn.functional.cross_entropy(output, targets)


def by_recipe(world, plan):
    seed_for_build(SEED)
    model, data = build(), from_datasets(dataset())
    train = TrainConfig(steps=STEPS, global_batch=BATCH, seed=SEED, precision="float16")
    optim = OptimConfig(name="momentum", lr=0.01, momentum=0.9, weight_decay=0.0, clip=0.5, schedule="constant")
    parsed = Plan.parse(plan)
    with Trainer(model, data, loss=steep, train=train, optim=optim, plan=parsed, world=world, was_tried=True) as made:
        made.train()
        progress = made.progress
        return made.engine.state_dict(everywhere=True), progress.loss_scale.scale, progress.skipped


def by_run(world, plan, whole, folder=None, stop_at=STEPS):
    with shoal.Run(plan=plan, seed=SEED, world=world, precision="float16", run_dir=folder) as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = run.loader(dataset(), global_batch=BATCH)
        model, optimizer = run.setup(model, optimizer, loss=steep)
        own, skipped = run._setups[0], 0
        for batch in loader.steps(stop_at):
            before = run.step_count
            if whole:
                run.step(batch, max_norm=0.5)
            else:
                run.forward_backward(batch)
                run.clip(0.5)
                optimizer.step()
            skipped += run.step_count == before
        return run.state_dict(whole=True), own.loss_scale.scale, skipped


@pytest.mark.parametrize("plan", PLANS)
def test_weights_scale_and_left_out_steps_are_those_of_a_recipe(plan):
    expected, scale, skipped = run_on_ranks(by_recipe, 2, plan)[0]
    assert 0 < skipped < STEPS - 3, "some updates overflow, and some are taken"
    for whole in (True, False):
        weights, own_scale, left_out = run_on_ranks(by_run, 2, plan, whole)[0]
        assert (own_scale, left_out) == (scale, skipped)
        assert all(torch.equal(weights[name], one) for name, one in expected.items())


def resumed(world, folder):
    _, first, _ = by_run(world, "dp=2", True, folder, stop_at=10)
    with shoal.Run(plan="dp=2", seed=SEED, world=world, precision="float16", run_dir=folder, resume=True) as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = run.loader(dataset(), global_batch=BATCH)
        model, optimizer = run.setup(model, optimizer, loss=steep)
        for batch in loader.steps(STEPS - 10):
            run.step(batch, max_norm=0.5)
        return run.state_dict(whole=True), run._setups[0].loss_scale.scale, first


def test_the_loss_scale_is_in_checkpoints(tmp_path):
    weights, scale, first = run_on_ranks(resumed, 2, str(tmp_path / "run"))[0]
    expected, at_end, _ = run_on_ranks(by_run, 2, "dp=2", True)[0]
    assert first < 2.0**16 and scale == at_end
    assert all(torch.equal(weights[name], one) for name, one in expected.items())
