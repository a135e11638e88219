"""From what the user wrote to what runs: degrees, microbatches and length, by pure arithmetic."""

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.engine.config import TrainConfig
from shoal.engine.resolve import (
    check_samples,
    check_settings,
    choose_plan,
    count_steps,
    resolve_alone,
    resolve_plan,
    schedule_of,
    updates_per_step,
)
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.csv_file import write_csv


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


def test_auto_is_picked_by_the_command_and_refused_everywhere_else():
    with pytest.raises(RequestError, match="picked by `shoal train`"):
        chosen("auto")


def layout(plan="dp=2", **train):
    return resolve_plan(TrainConfig(steps=1, **train), Plan.parse(plan))


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


@pytest.mark.parametrize(
    ("plan", "batch", "microbatches"),
    [
        ("pp=2", 16, 4),
        ("pp=3", 16, 8),
        ("dp=2 pp=2", 16, 4),
        ("pp=4", 6, 6),
        ("pp=4", 2, 2),
        ("pp=2", 7, 7),
        ("pp=2 schedule=chimera", 18, 6),
        ("pp=4 schedule=chimera", 24, 8),
        ("pp=2 schedule=dualpipe", 10, 10),
        ("pp=2 schedule=pipedream-2bw", 8, 4),
        ("pp=4 schedule=pipedream-2bw", 6, 6),
        ("pp=2 schedule=interleaved", 12, 4),
    ],
)
def test_a_pipeline_is_filled_well_when_nobody_says_how(plan, batch, microbatches):
    found = layout(plan, global_batch=batch)
    assert found.plan.microbatches == microbatches
    assert found.plan.schedule == (Plan.parse(plan).schedule or "1f1b"), "what runs is said"
    assert schedule_of(found.plan).grid.num_microbatches == microbatches


def test_the_size_of_a_microbatch_decides_for_a_pipeline_too():
    assert layout("pp=2", global_batch=16, micro_batch=2).plan.microbatches == 8
    assert layout("pp=2 microbatches=2", global_batch=16).micro_batch == 8


@pytest.mark.parametrize(
    ("plan", "train", "words"),
    [
        ("pp=2 microbatches=3", {"global_batch": 16}, ["microbatches=3", "16 samples", "set it to 2"]),
        ("pp=2 schedule=chimera microbatches=3", {"global_batch": 9}, ["chimera", "pp=2", "microbatches=3"]),
        (
            "pp=4 schedule=pipedream-2bw microbatches=2",
            {"global_batch": 8},
            ["pipedream-2bw", "pp=4", "microbatches=2"],
        ),
        ("pp=2", {"global_batch": 16, "micro_batch": 3}, ["micro_batch 3", "16 samples"]),
    ],
)
def test_microbatches_that_a_pipeline_cannot_have_are_refused(plan, train, words):
    with pytest.raises(RequestError) as refusal:
        layout(plan, **train)
    for word in words:
        assert word in str(refusal.value)


def test_a_file_says_how_many_microbatches_it_is_for(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(write_csv(make_schedule("zb-h1", ranks=2, microbatches=4)))
    assert layout(f"pp=2 schedule={path}", global_batch=16).plan.microbatches == 4
    with pytest.raises(RequestError, match=r"is for microbatches=4, and microbatches=8 is asked for"):
        layout(f"pp=2 schedule={path} microbatches=8", global_batch=16)
    with pytest.raises(RequestError, match=r"is for pp=2, and pp=4 is asked for"):
        layout(f"pp=4 schedule={path}", global_batch=16)
    with pytest.raises(RequestError, match=r"microbatches=4 does not divide the 6 samples"):
        layout(f"pp=2 schedule={path}", global_batch=6)
    with pytest.raises(RequestError, match=r"is for chunks=1, and chunks=2 is asked for"):
        layout(f"pp=2 schedule={path} chunks=2", global_batch=16)


def test_only_pipedream_updates_for_every_microbatch():
    counts = {
        name: updates_per_step(Plan.parse(f"pp=2 schedule={name} microbatches=4")) for name in ("1f1b", "pipedream")
    }
    assert counts == {"1f1b": 1, "pipedream": 4}
    assert updates_per_step(Plan.parse("pp=2 schedule=pipedream-2bw microbatches=4")) == 1
    assert updates_per_step(Plan.parse("dp=2 microbatches=4")) == 1


@pytest.mark.parametrize("setting", [{"precision": "float16"}, {"nonfinite": "skip"}, {"compile": True}])
def test_settings_that_need_all_stages_to_agree_are_refused_where_they_do_not(setting):
    train = TrainConfig(steps=1, global_batch=8, **setting)
    with pytest.raises(RequestError, match=f"train.{next(iter(setting))}"):
        check_settings(train, Plan.parse("pp=2 schedule=pipedream"))
    if "compile" not in setting:
        check_settings(train, Plan.parse("pp=2"))


def test_a_setup_and_another_plan_are_refused_and_the_same_plan_is_not():
    sizes = {"world_size": 2, "num_samples": 100, "tokens_per_sample": 1}
    train = TrainConfig(steps=3, global_batch=8)
    setup = resolve_alone(train, Plan.parse("dp=2 microbatches=2"), **sizes)
    assert resolve_alone(train, None, setup=setup, **sizes) is setup
    assert resolve_alone(train, Plan.parse("microbatches=2"), setup=setup, **sizes) is setup, (
        "what is left out is derived"
    )
    with pytest.raises(RequestError, match=r"'dp=2 microbatches=2' and plan= is 'dp=1 tp=2'"):
        resolve_alone(train, Plan.parse("tp=2"), setup=setup, **sizes)
