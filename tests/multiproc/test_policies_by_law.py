"""Policies that say the same thing in other words: they end in the same weights, up to roundings.

Under plain SGD a step of one's own and then the mean of the weights is a step by the mean gradient, so ``local:1`` is an
all-reduce of gradients; gossip with everybody is that mean; and a codec that is none leaves the plan as it is. No oracle is
asked here.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.core.plan import Plan
from shoal.data.sources.own import from_datasets
from shoal.engine.config import TrainConfig
from shoal.optim.config import OptimConfig
from shoal.telemetry.config import TelemetryConfig
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.loop import Trainer

STEPS = 20
PLANS = (
    "dp=3",
    "islands=3 dp=1 sync=local:1",
    "islands=3 dp=1 sync=gossip:complete",
    "islands=3 dp=1 sync=gossip:ring",
    "islands=3 dp=1 sync=local:2",
)
BOUNDS = {"float64": 1e-12, "float32": 1e-5}


def train_all(world):
    """By plan and precision, all weights at the end."""
    return {(plan, precision): train(world, plan, precision) for plan in PLANS for precision in BOUNDS}


def train(world, plan, precision):
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(96, 5, generator=generator, dtype=torch.float64).to(getattr(torch, precision))
    torch.manual_seed(2)
    trainer = Trainer(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)),
        from_datasets(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), ()),
        loss=lambda outputs, targets: ((outputs - targets) ** 2).mean(),
        train=TrainConfig(steps=STEPS, global_batch=12, precision=precision),
        optim=OptimConfig(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0, clip=None),
        telemetry=TelemetryConfig(tensorboard=False),
        plan=Plan.parse(plan),
        world=world,
    )
    trainer.train()
    found = torch.cat([one.detach().reshape(-1).clone() for one in trainer.engine.reduction.updated.values()])
    # The ranks go on with the next plan, so only what is this one's is closed.
    trainer.persistence.close()
    trainer.reporter.close()
    trainer.mesh.close()
    return found


@pytest.fixture(scope="module")
def ends():
    return run_on_ranks(train_all, 3)


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("plan", PLANS[1:4])
def test_one_step_and_the_mean_of_the_weights_is_a_step_by_the_mean_gradient(ends, plan, precision):
    for rank in ends:
        apart = (rank[plan, precision] - rank["dp=3", precision]).abs().max()
        assert apart <= BOUNDS[precision], f"{plan}: {apart:.2e} apart"


@pytest.mark.parametrize("precision", BOUNDS)
def test_two_steps_and_the_mean_are_another_thing(ends, precision):
    """So the bound above would notice: rounds that are left out move weights by much more."""
    apart = max((rank[PLANS[4], precision] - rank["dp=3", precision]).abs().max() for rank in ends)
    assert apart > 10 * BOUNDS[precision], f"{apart:.2e} apart"


@pytest.mark.parametrize("precision", BOUNDS)
def test_gossip_with_everybody_is_the_mean(ends, precision):
    for rank in ends:
        apart = (
            (rank["islands=3 dp=1 sync=gossip:complete", precision] - rank["islands=3 dp=1 sync=local:1", precision])
            .abs()
            .max()
        )
        assert apart <= BOUNDS[precision], f"{apart:.2e} apart"


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=1", "ps=2 workers=2", "islands=2 dp=1 sync=local:3"])
def test_compressing_by_nothing_is_the_same_plan(plan):
    none, plain = Plan.parse(f"{plan} compress=none"), Plan.parse(plan)
    assert none == plain and str(none) == str(plain)
