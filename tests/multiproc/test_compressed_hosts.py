"""What goes compressed between replicas and islands has the same bits through gloo as through shared memory, on any hosts.

Hosts are named by hand, as in ``test_two_hosts.py``: ranks of different ones do not share memory.
"""

import pytest
import torch

from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.config import SyntheticConfig
from shoal.engine.config import TrainConfig
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import build_loss
from shoal.optim.config import OptimConfig
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.loop import Trainer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

PLANS = [
    "dp=4 compress=int8",
    "dp=4 compress=powersgd:2",
    "dp=4 compress=topk:0.05",
    "dp=4 compress=onebit@4",
    "dp=4 zero=2 compress=int4",
    "dp=4 sync=gossip:ring compress=int8",
    "islands=2 dp=2 zero=1 sync=stream:4,2,1 compress=int4",
]
HOSTS = {"one": [0, 0, 0, 0], "two": [0, 0, 1, 1], "three": [0, 0, 1, 2], "apart": [0, 1, 0, 1]}
STEPS = 10


def train(world, plan, hosts):
    """The hash of the weights of this rank's island after some steps."""
    world.hosts = tuple(hosts)
    config = GptConfig(layers=2, hidden=64, heads=2)
    data = build_splits(SyntheticConfig(sequence=8, samples=64), 1)
    torch.manual_seed(1)
    trainer = Trainer(
        build_model(config, data.spec),
        data,
        loss=build_loss(config, data.spec),
        train=TrainConfig(steps=STEPS, global_batch=8, seed=1),
        optim=OptimConfig(name="adamw", lr=1e-2),
        plan=Plan.parse(plan),
        world=world,
    )
    for _ in trainer.training_steps():
        pass
    found = trainer.hash_weights()
    trainer.engine.close()
    return found


def train_all(world, plans, hosts):
    return [[train(world, plan, numbers) for numbers in hosts] for plan in plans]


def test_hosts_change_no_bit_of_what_goes_compressed():
    ranks = run_on_ranks(train_all, 4, PLANS, list(HOSTS.values()), deadline_seconds=280.0)
    for number, plan in enumerate(PLANS):
        found = {tuple(rank[number][place] for rank in ranks) for place in range(len(HOSTS))}
        assert len(found) == 1, f"{plan}: other bits on other hosts: {found}"
    others = {rank[number][0] for rank in ranks for number in range(len(PLANS))}
    assert len(others) == len(PLANS), "plans that lose other things end in other weights"
