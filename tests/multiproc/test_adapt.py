"""Rates that adapt, on several ranks: each rule finds what one process finds, and goes on after a resume as if never stopped."""

import itertools
import json

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


def train(world, plan, rule, folder=None, stop_after=99, resume=False, changed=None):
    length = {**RECIPE["train"], **(changed or {})}
    optim = {"name": "momentum", "lr": length.pop("lr", 0.05), "adapt": rule, "scale_base": 2}
    recipe = Recipe.model_validate({**RECIPE, "optim": optim, "train": length})
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
        rates, sums = [], 0
        running = trainer.training_steps()
        while True:
            with trainer.mesh.traffic.counting() as counts:
                done = next(running, None)
            if done is None:
                break
            sums = {key: (one.calls, one.num_bytes) for key, one in counts.items()} if done.step == 1 else sums
            rates.append(done.lr)
            if done.step == stop_after:
                trainer.request_stop("test")
        state = {} if trainer.adapt is None else dict(trainer.adapt.state())
        found = {"rates": rates, "state": state, "weights": trainer.hash_weights()}
        return {**found, "sums": sums} if (changed or {}).get("watch_every") == 0 else found


@pytest.mark.parametrize(
    "rule", ["noise", "adascale", *(pytest.param(rule, marks=pytest.mark.soak) for rule in ("bold", "hyper"))]
)
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


@pytest.mark.parametrize(
    "rule", ["hyper", *(pytest.param(rule, marks=pytest.mark.soak) for rule in ("adascale", "bold"))]
)
def test_a_resumed_run_ends_as_the_one_that_was_left_alone(rule, tmp_path):
    plan = "dp=2 zero=1 microbatches=1"
    whole = run_on_ranks(train, 2, plan, rule, str(tmp_path / "whole"))[0]
    run_on_ranks(train, 2, plan, rule, str(tmp_path / "cut"), 2)
    again = run_on_ranks(train, 2, plan, rule, str(tmp_path / "cut"), 99, True)[0]
    assert 0 < len(again["rates"]) < len(whole["rates"])
    assert again["state"] == whole["state"]
    assert again["weights"] == whole["weights"]
    assert again["rates"] == whole["rates"][-len(again["rates"]) :]


@pytest.mark.soak
@pytest.mark.parametrize("rule", ["bold", "hyper"])
def test_a_pipeline_follows_and_resumes_a_rule_as_one_process_does(rule, tmp_path):
    alone = run_on_ranks(train, 1, "dp=1 microbatches=2", rule)[0]
    plan = "pp=2 microbatches=2"
    assert run_on_ranks(train, 2, plan, rule)[0] == alone
    run_on_ranks(train, 2, plan, rule, str(tmp_path / "cut"), 3)
    again = run_on_ranks(train, 2, plan, rule, str(tmp_path / "cut"), 99, True)[0]
    assert again["state"] == alone["state"] and again["weights"] == alone["weights"]


@pytest.mark.soak
def test_rolling_back_takes_the_bold_driver_back_too(tmp_path):
    """Steps that are left out lead back to a checkpoint: the factor is that of the checkpoint, and evaluations count once."""
    spiky = {"spike": 1.0001, "rollback_after": 2, "steps": 12, "lr": 3.0}
    both = run_on_ranks(train, 2, "dp=2", "bold", str(tmp_path / "two"), 99, False, spiky)
    alone = run_on_ranks(train, 1, "dp=1 microbatches=2", "bold", str(tmp_path / "one"), 99, False, spiky)[0]
    assert both[0] == both[1] == alone
    events = [json.loads(line) for line in (tmp_path / "two" / "events" / "rank-000.jsonl").read_text().splitlines()]
    places = [place for place, event in enumerate(events) if event["kind"] == "rolled_back"]
    assert places, "the run went back"
    kept = {event["step"]: event["rate_factor"] for event in events[: places[0]] if event["kind"] == "adapted"}
    after = next(event for event in events[places[0] :] if event["kind"] == "adapted")
    assert after["rate_factor"] == kept[events[places[0]]["to_step"]]


@pytest.mark.soak
def test_float16_measures_the_gradient_without_its_loss_scale():
    short, half = ({"precision": name, "steps": 4} for name in ("float32", "float16"))
    plain = run_on_ranks(train, 2, "dp=2", "noise", None, 99, False, short)[0]["state"]
    scaled = run_on_ranks(train, 2, "dp=2", "noise", None, 99, False, half)[0]["state"]
    assert scaled["variance"] / scaled["weight"] == pytest.approx(plain["variance"] / plain["weight"], rel=0.2)


def test_measuring_the_noise_costs_one_small_message_a_step():
    """Two float64 for each microbatch of all replicas, in one sum along dp; nothing else crosses that would not without it."""
    quiet = {"steps": 2, "watch_every": 0}
    with_it = run_on_ranks(train, 2, "dp=2 microbatches=2", "noise", None, 99, False, quiet)[0]["sums"]
    without = run_on_ranks(train, 2, "dp=2 microbatches=2", "none", None, 99, False, quiet)[0]["sums"]
    key = ("dp", "all_reduce")
    assert {name: one for name, one in with_it.items() if name != key} == {
        name: one for name, one in without.items() if name != key
    }
    calls, num_bytes = without.get(key, (0, 0))
    assert with_it[key] == (calls + 1, num_bytes + 2 * 8 * 4)


def bold_factors(losses, steps):
    """Of each step, by the bold driver written a second time (Vogl et al. 1988; Battiti 1989).

    Losses are by the step after which they were measured: a fall raises the rate, a rise halves it.
    """
    factor, best, last, found = 1.0, None, None, []
    for step in range(1, steps + 1):
        found.append(factor)
        if step not in losses:
            continue
        loss = losses[step]
        if best is None:
            best = last = loss
            continue
        fell, rose = loss < best * (1 - 1e-3), loss > last * (1 + 1e-3)
        factor = min(10.0, factor * 1.05) if fell else max(0.05, factor * 0.5) if rose else factor
        best, last = (loss if fell else best), loss
    return found


def test_rates_of_a_run_are_those_of_the_bold_driver_by_its_own_evaluations(tmp_path):
    """A proof makes no evaluations, so the rule is held here to what a run on two ranks says that it measured."""
    wild = {"steps": 24, "lr": 0.9}
    rates = run_on_ranks(train, 2, "dp=2", "bold", str(tmp_path), 99, False, wild)[0]["rates"]
    events = [json.loads(line) for line in (tmp_path / "events" / "rank-000.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["loss"] for one in events if one["kind"] == "evaluated"}
    expected = bold_factors(losses, 24)
    assert [rate / rates[0] for rate in rates] == pytest.approx(expected, rel=1e-12)
    changes = [after / before for before, after in itertools.pairwise(expected)]
    assert max(changes) > 1 > min(changes), "it both rose and fell"
