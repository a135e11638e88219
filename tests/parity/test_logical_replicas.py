"""A plan of R replicas on fewer processes: those present compute the shares of the others, and every bit is that of R processes.

The run with all its replicas is today's path (DDP, ZeRO's overlapped sums); it is proved against one process elsewhere. Here
each of its losses, norms, weights, optimizer states and evaluations must come out of any smaller number of processes.
"""

import functools

import pytest
import torch

from shoal.core.logical import rounds_of
from shoal.core.plan import Plan
from shoal.engine.state import hash_weights_of
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

GPT = {"name": "gpt", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1}
TEXT = {"source": "stdlib", "sequence": 16, "limit_bytes": 200_000}
ADAMW = {"name": "adamw", "lr": 1e-2, "clip": 0.1, "weight_decay": 0.1}
CASES = {
    "gpt": {"model": GPT, "data": TEXT, "optim": ADAMW},
    "gpt accumulating": {"model": {**GPT, "tied": True}, "data": TEXT, "optim": ADAMW, "train": {"micro_batch": 1}},
    "gpt unclipped": {"model": GPT, "data": TEXT, "optim": {"name": "adamw", "lr": 1e-2}},
    # Replicas weigh differently, and the last batch of an epoch has one sample: most replicas have none.
    "seq2seq, ragged": {
        "model": {"name": "seq2seq", "layers": 1, "hidden": 16, "heads": 2, "dropout": 0.1},
        "data": {"source": "synthetic", "kind": "reverse", "samples": 13, "validation": 0, "test": 0},
        "optim": ADAMW,
    },
    "bfloat16": {"model": GPT, "data": TEXT, "optim": ADAMW, "train": {"precision": "bfloat16"}},
    "mlp, odd": {
        "model": {"name": "mlp", "layers": 2, "hidden": 17, "dropout": 0.1},
        "data": {"source": "synthetic", "kind": "regression", "samples": 64},
        "optim": {"name": "adam", "lr": 1e-2, "clip": 0.1},
        "eval": {"metrics": ["mae", "rmse"]},
    },
}
STEPS = 5


def make_recipe(case, plan):
    tables = {**CASES[case], "plan": plan}
    tables["train"] = {"steps": STEPS, "global_batch": 12, "seed": 3, **tables.get("train", {})}
    tables["telemetry"] = {"tensorboard": False}
    return Recipe.model_validate(tables)


def train(world, case, plan, num_logical):
    """Train on this rank; returns all that must not depend on how many processes there are."""
    torch.set_num_threads(1)
    world.num_logical = num_logical
    recipe = make_recipe(case, plan)
    model, loss, data = build_parts(recipe)
    with Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        optim=recipe.optim,
        evaluation=recipe.eval,
        plan=Plan.parse(plan),
        telemetry=recipe.telemetry,
        world=world,
        was_tried=True,
    ) as trainer:
        steps = [[done.loss, done.grad_norm, done.samples] for done in trainer.training_steps()]
        found = trainer.evaluate("validation")
        own = trainer.engine.state(STEPS)
        return {
            "steps": steps,
            "weights": trainer.hash_weights(),
            # Without ZeRO everything is whole on every rank; with it the weights are made of all that is sharded.
            "state": hash_weights_of(sorted(own.tensors.items())) if Plan.parse(plan).zero == 0 else "",
            "evaluation": None if found is None else [found.loss, found.accuracy, dict(found.metrics)],
        }


@functools.cache
def on_ranks(case, plan, num_ranks, num_logical):
    found = run_on_ranks(train, num_ranks, case, plan, 0 if num_ranks == num_logical else num_logical)
    assert all(other == found[0] for other in found[1:]), "ranks agree"
    return found[0]


def check(case, plan, num_logical, present):
    whole = on_ranks(case, plan, num_logical, num_logical)
    found = on_ranks(case, plan, present, num_logical)
    if Plan.parse(plan).zero and "clip" not in CASES[case]["optim"]:
        # Only shown then, and summed by shards: the last digit follows the cut.
        for mine, other in zip(found["steps"], whole["steps"], strict=True):
            assert mine[1] == pytest.approx(other[1], rel=1e-6)
            mine[1] = other[1]
    assert found == whole


QUICK = [("gpt accumulating", "dp=4", 4, 3), ("seq2seq, ragged", "dp=4 zero=3", 4, 3)]
SOAK = [
    (case, f"dp={num}{zero}", num, present)
    for case in CASES
    for zero in ("", " zero=1", " zero=2", " zero=3")
    for num, present in ((4, 1), (4, 2), (4, 3), (3, 2))
]


@pytest.mark.parametrize(("case", "plan", "num_logical", "present"), QUICK)
def test_fewer_processes_give_the_same_bits(case, plan, num_logical, present):
    check(case, plan, num_logical, present)


@pytest.mark.soak
@pytest.mark.parametrize(("case", "plan", "num_logical", "present"), SOAK)
def test_every_stage_and_case_gives_the_same_bits(case, plan, num_logical, present):
    check(case, plan, num_logical, present)


@pytest.mark.parametrize("num_logical", range(1, 9))
def test_rounds_go_through_the_logical_replicas_in_their_order(num_logical):
    for present in range(1, num_logical + 1):
        dealt = [rounds_of(place, num_logical=num_logical, num_present=present) for place in range(present)]
        in_turn = [number for turn in zip(*dealt, strict=True) for number in turn if number is not None]
        assert in_turn == list(range(num_logical))
        assert all(rounds[0] is not None for rounds in dealt)
