"""From what the user wrote to what runs: degrees, microbatches and length, by pure arithmetic."""

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.trainer.config import TrainConfig
from shoal.trainer.layout import check_samples, check_settings, choose_plan, count_steps, derive_layout


def chosen(recipe_plan="dp=2", plan_text=None, num_processes=None):
    return choose_plan(recipe_plan, plan_text=plan_text, num_processes=num_processes)


def test_the_command_line_wins_over_the_recipe():
    assert chosen("dp=2").dp == 2
    assert chosen("dp=2", plan_text="dp=3").dp == 3
    assert chosen("dp=2", num_processes=4).dp == 4, "a degree in the recipe is a default"
    assert chosen("dp=2 microbatches=4", num_processes=1).microbatches == 4
    assert chosen("", num_processes=3).dp == 3


def test_a_plan_on_the_command_line_must_match_the_processes():
    with pytest.raises(RequestError, match="4 processes are not dp 2"):
        chosen(plan_text="dp=2", num_processes=4)


def test_auto_is_refused_until_there_is_a_planner():
    with pytest.raises(RequestError, match="no planner"):
        chosen("auto")


def layout(plan="dp=2", **train):
    return derive_layout(TrainConfig(steps=1, **train), Plan.parse(plan))


def test_microbatches_come_from_either_side():
    assert layout(global_batch=16).micro_batch == 8
    assert layout(global_batch=16).plan.microbatches == 1
    assert layout(global_batch=16, micro_batch=2).plan.microbatches == 4
    assert layout("dp=2 microbatches=4", global_batch=16).micro_batch == 2
    assert layout("dp=2 microbatches=4", global_batch=16, micro_batch=2).micro_batch == 2


@pytest.mark.parametrize(
    ("plan", "train", "words"),
    [
        ("dp=3", {"global_batch": 16}, ["16", "dp 3", "15 or 18"]),
        ("dp=2", {"global_batch": 16, "micro_batch": 3}, ["micro_batch 3", "8 samples", "set it to 2"]),
        ("dp=2 microbatches=3", {"global_batch": 16}, ["microbatches=3", "8 samples", "set it to 2"]),
        ("dp=2 microbatches=2", {"global_batch": 16, "micro_batch": 2}, ["2 x microbatches 2 = 4", "8 samples"]),
        ("dp=4", {"global_batch": 2}, ["2 is not divisible by dp 4", "set it to 4,"]),
    ],
)
def test_contradictions_give_both_numbers_and_a_fix(plan, train, words):
    with pytest.raises(RequestError) as refusal:
        layout(plan, **train)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 1}, 4),
        ({"epochs": 2}, 8),
        ({"epochs": 0.5}, 2),
        ({"epochs": 1.3}, 5),
        ({"tokens": 320}, 1),
        ({"tokens": 321}, 2),
        ({"tokens": 1000}, 4),
        ({"tokens": 1010}, 5),
    ],
)
def test_length_in_epochs_or_tokens_counts_the_short_last_batch(length, steps):
    config = TrainConfig(global_batch=32, **length)
    assert count_steps(config, num_samples=100, tokens_per_sample=10) == steps


@pytest.mark.parametrize("length", [{}, {"steps": 1, "epochs": 1}, {"tokens": 1, "steps": 2, "epochs": 1}])
def test_a_length_is_given_exactly_once(length):
    with pytest.raises(ValueError, match="exactly one of steps, epochs and tokens"):
        TrainConfig(**length)


def test_more_replicas_than_samples_are_refused():
    check_samples(num_samples=2, replicas=2)
    with pytest.raises(RequestError, match=r"3 samples and the plan has 4 replicas"):
        check_samples(num_samples=3, replicas=4)


def test_settings_that_a_plan_cannot_carry_out_are_refused():
    check_settings(TrainConfig(steps=1, global_batch=8, compile=True), Plan.parse("dp=2"))
    with pytest.raises(RequestError, match=r"plan 'dp=2 zero=3': train\.compile goes with dp alone"):
        check_settings(TrainConfig(steps=1, global_batch=8, compile=True), Plan.parse("dp=2 zero=3"))
