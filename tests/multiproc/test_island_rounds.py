"""Rounds in which an island is not finite, or weighs by its samples: policies on real ranks equal the oracle's rules."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.core.events import RoundDone
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.data.sources.own import from_datasets
from shoal.engine.config import TrainConfig
from shoal.engine.hooks import Hook
from shoal.optim.config import OptimConfig
from shoal.replicas.build import build_policy
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.policy import Island, StepEnd
from shoal.telemetry.config import TelemetryConfig
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.loop import Trainer
from shoal.verify.oracle.islands import Agreement

COUNT, STEPS = 3, 13
SPOILT = (4, 1)
"""The step after which an island is not finite, and which one."""
RULES = ("sparse:3,0.3", "local:3", "diloco:3", "slowmo:3", "easgd:3", "stream:4,2,1")
CASES = [
    (rule, weigh, True)
    for rule in RULES
    for weigh in ("equal", "samples")
    if weigh == "equal" or rule not in ("easgd:3", "sparse:3,0.3")
]
CASES += [("diloco:3", "samples", False), ("stream:4,2,1", "samples", False)]


def walk(step, island):
    """What an optimizer might do to each weight, and from how many samples."""
    generator = torch.Generator().manual_seed(1000 * step + island)
    return {name: 0.1 * torch.randn(7, generator=generator) for name in "abc"}, 1 + (step * (island + 2)) % 4


def first():
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(7, generator=generator) for name in "abc"}


def spoil(weights, step, island):
    if (step, island) == SPOILT:
        weights["b"][3] = math.nan


def all_cases(world):
    """The weights that this island has after each case."""
    found = []
    mesh = build_mesh(world, Plan.parse(f"islands={COUNT} dp=1 sync=stream:4,2,1"))
    background = mesh.add_background(world, Axis.ISLAND)
    for text, weigh, is_spoilt in CASES:
        weights, rule = first(), SyncRule.parse(text)
        island = Island(
            channel=mesh.channel(Axis.ISLAND),
            weights=weights,
            seed=1,
            inside=mesh.everyone,
            background=background if rule.kind == "stream" else None,
        )
        policy = build_policy(island, rule, ReplicaConfig(weigh=weigh), order=sorted(weights))
        left_out = []
        for step in range(STEPS):
            policy.before_update()
            moves, samples = walk(step, world.rank)
            for name, move in moves.items():
                weights[name].sub_(move)
            if is_spoilt:
                spoil(weights, step, world.rank)
            policy.after_update(StepEnd(step=step, lr=0.1, is_round=rule.is_round(step), samples=samples))
            left_out += [(step, one) for one in policy.left_out]
        policy.close()
        found.append({"weights": weights, "left_out": left_out})
    mesh.close()
    return found


def by_oracle(text, weigh, is_spoilt):
    islands = [first() for _ in range(COUNT)]
    settings = ReplicaConfig(weigh=weigh).model_dump(mode="json")
    rule = SyncRule.parse(text)
    agreement = Agreement(rule, settings, islands, seed=1)
    left_out = []
    for step in range(STEPS):
        agreement.before_update()
        samples = []
        for number, weights in enumerate(islands):
            moves, count = walk(step, number)
            samples.append(count)
            for name, move in moves.items():
                weights[name].sub_(move)
            if is_spoilt:
                spoil(weights, step, number)
        agreement.after_update(step, 0.1, samples)
        left_out += [(step, one) for one in agreement.left_out]
    return islands, left_out


def test_rounds_with_an_island_that_is_not_finite_or_weighs_more_equal_the_oracle():
    ranks = run_on_ranks(all_cases, COUNT)
    for place, case in enumerate(CASES):
        islands, left_out = by_oracle(*case)
        assert bool(left_out) is case[2], case
        for number, weights in enumerate(islands):
            found = ranks[number][place]
            assert found["left_out"] == left_out, case
            assert all(torch.equal(found["weights"][name], weights[name]) for name in weights), (case, number)
            assert all(bool(torch.isfinite(weight).all()) for weight in found["weights"].values()), case


class Spoil(Hook):
    """Makes a weight of island 1 useless after the third step."""

    def __init__(self, world):
        self.world = world
        self.model = None

    def on_attach(self, model):
        self.model = model

    def on_update(self, step, result):
        if step == 2 and self.world.rank == 1:
            with torch.no_grad():
                next(iter(self.model.reduction.updated.values())).fill_(math.inf)


def train(world, nonfinite):
    inputs = torch.linspace(-1.0, 1.0, 64).unsqueeze(1)
    rounds, losses = [], []
    with Trainer(
        nn.Linear(1, 1),
        from_datasets(TensorDataset(inputs, 2.0 * inputs), ()),
        loss=lambda outputs, targets: ((outputs - targets) ** 2).mean(),
        train=TrainConfig(steps=12, global_batch=8, nonfinite=nonfinite),
        optim=OptimConfig(name="adamw", lr=0.05),
        telemetry=TelemetryConfig(tensorboard=False),
        plan=Plan.parse("islands=2 dp=1 sync=diloco:5"),
        world=world,
        hooks=[Spoil(world)],
    ) as trainer:
        heard = trainer.reporter.rounds
        trainer.reporter.rounds = lambda events: heard(rounds.extend(events) or events)
        for done in trainer.training_steps():
            losses.append(done.loss)
        sha = trainer.hash_weights()
        skipped = trainer.progress.skipped
    held = [(one.step, list(one.left_out)) for one in rounds if isinstance(one, RoundDone)]
    return {"rounds": held, "losses": losses, "sha": sha, "skipped": skipped}


def test_a_run_goes_on_without_an_island_whose_weights_are_lost():
    first, second = run_on_ranks(train, 2, "skip")
    assert first["rounds"] == second["rounds"] == [(5, [1]), (10, [])]
    assert first["sha"] == second["sha"]
    assert first["skipped"] == 0 and second["skipped"] == 2
    assert all(math.isfinite(loss) for loss in (*first["losses"], *second["losses"][5:]))


def test_by_default_the_island_that_is_not_finite_ends_the_run_and_is_named():
    with pytest.raises(RunError, match=r"step 4: weight .* is not finite on rank 1"):
        run_on_ranks(train, 2, "stop")
