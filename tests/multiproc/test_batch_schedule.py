"""Batches that grow, on several ranks: every plan takes the same samples, a resumed run goes on with the batch it was at."""

import pytest

from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.verify.session import verify

TABLES = {
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2, "dropout": 0.1},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 75, "sequence": 8, "vocab": 17, "validation": 0.05},
    "train": {"steps": 8, "batch_schedule": [[0, 8], [3, 16], [5, 32]]},
    "optim": {"name": "adamw", "lr": 0.01, "scale": "sqrt", "scale_base": 4, "hold_half_life": True},
    "checkpoint": {"every": 2, "keep": 9},
}
NOISY = {
    "train": {"steps": 12, "global_batch": 8, "batch_schedule": "noise", "batch_every": 3, "batch_limit": 32},
    "optim": {
        "name": "adamw",
        "lr": 0.01,
        "adapt": "noise",
        "adapt_smoothing": 0.5,
        "scale": "linear",
        "scale_base": 8,
    },
}


def train(world, plan, changed=None, folder=None, stop_after=99, resume=False):
    recipe = Recipe.model_validate({**TABLES, **(changed or {})})
    model, loss, data = build_parts(recipe)
    trainer = Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        optim=recipe.optim,
        evaluation=recipe.eval,
        checkpoint=recipe.checkpoint,
        plan=Plan.parse(plan),
        world=world,
        run_dir=folder,
        resume=resume,
    )
    with trainer:
        steps = []
        for done in trainer.training_steps():
            steps.append((done.step, done.samples, done.lr, done.loss))
            # The request travels with the next step, which all ranks still take.
            if done.step == stop_after:
                trainer.request_stop("test")
        betas = trainer.optimizer.param_groups[0]["betas"]
        return {"steps": steps, "weights": trainer.hash_weights(), "tokens": trainer.progress.tokens, "betas": betas}


def test_two_replicas_sharded_or_not_take_the_batches_of_the_schedule():
    both = run_on_ranks(train, 2, "dp=2")
    sharded = run_on_ranks(train, 2, "dp=2 zero=3")
    assert both[0] == both[1] == sharded[0]
    assert [samples for _, samples, _, _ in both[0]["steps"]] == [8, 8, 8, 16, 16, 11, 32, 32], "the epoch has 67"
    assert both[0]["tokens"] == 8 * (67 + 64)
    rates = [lr for _, _, lr, _ in both[0]["steps"]]
    assert (
        rates[0] == pytest.approx(0.01 * 2**0.5)
        and rates[3] == pytest.approx(0.02)
        and rates[5] == pytest.approx(0.01 * 8**0.5)
    )
    assert both[0]["betas"][1] == 0.999 ** (32 / 4)


@pytest.mark.soak
def test_a_pipeline_runs_more_microbatches_and_has_the_bits_of_one_process():
    alone = run_on_ranks(train, 1, "dp=1 microbatches=2")[0]
    for plan in ("pp=2 microbatches=2", "pp=2 schedule=zbv microbatches=2"):
        assert run_on_ranks(train, 2, plan)[0]["weights"] == alone["weights"]


@pytest.mark.soak
@pytest.mark.parametrize("changed", [{}, NOISY])
@pytest.mark.parametrize("stop_after", [3, 5])
def test_a_resumed_run_goes_on_with_the_batch_that_it_was_at(changed, stop_after, tmp_path):
    plan = "dp=2 zero=1 microbatches=1"
    whole = run_on_ranks(train, 2, plan, changed, str(tmp_path / "whole"))[0]
    run_on_ranks(train, 2, plan, changed, str(tmp_path / "cut"), stop_after)
    again = run_on_ranks(train, 2, plan, changed, str(tmp_path / "cut"), 99, True)[0]
    assert again["steps"] == whole["steps"][stop_after + 1 :] and again["weights"] == whole["weights"]
    assert len({samples for _, samples, _, _ in whole["steps"]}) > 1, "the batch grew"


@pytest.mark.soak
def test_noise_grows_the_batch_alike_under_every_plan():
    alone = run_on_ranks(train, 1, "dp=1 microbatches=2", NOISY)[0]
    both = run_on_ranks(train, 2, "dp=2", NOISY)[0]
    sizes = [samples for _, samples, _, _ in both["steps"]]
    assert sizes[:3] == [8, 8, 8] and max(sizes) > 8
    assert [samples for _, samples, _, _ in alone["steps"]] == sizes


@pytest.mark.soak
def test_another_number_of_replicas_holds_batch_and_rate(tmp_path):
    """The hold-the-batch rule: what a step is does not depend on who takes it, unless the user changes the batch."""
    fixed = {"train": {"steps": 8, "global_batch": 8, "micro_batch": 4}}
    one = run_on_ranks(train, 1, "dp=1", fixed, str(tmp_path / "run"), 3)[0]
    two = run_on_ranks(train, 2, "dp=2", fixed, str(tmp_path / "run"), 99, True)[0]
    assert [step for step, _, _, _ in two["steps"]] == [5, 6, 7, 8]
    assert {(samples, lr) for _, samples, lr, _ in two["steps"]} == {(8, one["steps"][0][2])}
    alone = run_on_ranks(train, 1, "dp=1", fixed)[0]
    assert two["weights"] == alone["weights"], "two microbatches are two replicas: the same bits"


@pytest.mark.soak
def test_a_larger_batch_after_a_resume_scales_the_rate_and_keeps_the_position(tmp_path):
    small, large = ({"train": {"steps": 8, "global_batch": size, "micro_batch": 4}} for size in (8, 16))
    first = run_on_ranks(train, 1, "dp=1", small, str(tmp_path / "run"), 3)[0]
    second = run_on_ranks(train, 2, "dp=2", large, str(tmp_path / "run"), 99, True)[0]
    assert {samples for _, samples, _, _ in second["steps"]} == {16, 3}, "32 samples of 67 were taken before"
    assert second["steps"][0][2] == pytest.approx(first["steps"][0][2] * 2**0.5)


@pytest.mark.soak
def test_a_schedule_is_proved_to_the_bit_and_one_that_is_too_long_is_refused():
    found = verify(TABLES, ["dp=2", "dp=2 zero=2", "pp=2 microbatches=2"], overrides=["train.steps=9"])
    assert [(plan.ok, plan.bitwise, plan.steps) for plan in found.plans] == [(True, True, 7)] * 3
    assert all(plan.prediction.ok for plan in found.plans)
    with pytest.raises(Exception, match=r"train\.batch_schedule has changed the batch after 502 steps"):
        verify(TABLES, ["dp=2"], overrides=["train.batch_schedule=[[0, 8], [500, 16]]"])
