"""Rates that adapt, on several ranks: each rule finds what one process finds, and goes on after a resume as if never stopped."""

import pytest

from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer

RECIPE = {
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 17},
    "train": {"steps": 9, "global_batch": 8},
    "eval": {"every": 2, "batch": 1},
    "checkpoint": {"every": 3, "keep": 9},
}


def train(world, plan, rule, folder=None, stop_after=99, resume=False):
    optim = {"name": "momentum", "lr": 0.05, "adapt": rule, "scale_base": 2}
    recipe = Recipe.model_validate({**RECIPE, "optim": optim})
    model, loss, data = build_parts(recipe)
    sections = {"train": recipe.train, "optim": recipe.optim, "evaluation": recipe.eval}
    trainer = Trainer(
        model,
        data,
        loss=loss,
        **sections,
        checkpoint=recipe.checkpoint,
        plan=Plan.parse(plan),
        world=world,
        run_dir=folder,
        resume=resume,
    )
    with trainer:
        rates = []
        for done in trainer.training_steps():
            rates.append(done.lr)
            if done.step == stop_after:
                trainer.request_stop("test")
        return {"rates": rates, "state": dict(trainer.adapt.state()), "weights": trainer.hash_weights()}


@pytest.mark.parametrize("rule", ["noise", "adascale", "bold", "hyper"])
def test_two_replicas_find_what_one_process_finds(rule):
    alone = run_on_ranks(train, 1, "dp=1 microbatches=2", rule)[0]
    for plan in ("dp=2 microbatches=1", "dp=2 zero=3 microbatches=1"):
        both = run_on_ranks(train, 2, plan, rule)
        assert both[0] == both[1]
        if rule == "noise":
            assert both[0]["weights"] == alone["weights"]
            assert both[0]["state"]["variance"] == pytest.approx(alone["state"]["variance"], rel=1e-5)
        else:
            assert both[0] == alone
    assert len(set(alone["rates"])) > 1 or rule == "noise"


def test_shares_are_microbatches_whatever_the_replicas():
    alone = run_on_ranks(train, 1, "dp=1 microbatches=4", "noise")[0]["state"]
    both = run_on_ranks(train, 2, "dp=2 microbatches=2", "noise")[0]["state"]
    assert alone["variance"] > 0
    for key in ("square", "variance", "weight", "progress"):
        assert both[key] == pytest.approx(alone[key], rel=1e-4)


@pytest.mark.parametrize("rule", ["adascale", "bold", "hyper"])
def test_a_resumed_run_ends_as_the_one_that_was_left_alone(rule, tmp_path):
    plan = "dp=2 zero=1 microbatches=1"
    whole = run_on_ranks(train, 2, plan, rule, str(tmp_path / "whole"))[0]
    run_on_ranks(train, 2, plan, rule, str(tmp_path / "cut"), 2)
    again = run_on_ranks(train, 2, plan, rule, str(tmp_path / "cut"), 99, True)[0]
    assert 0 < len(again["rates"]) < len(whole["rates"])
    assert again["state"] == whole["state"]
    assert again["weights"] == whole["weights"]
    assert again["rates"] == whole["rates"][-len(again["rates"]) :]
