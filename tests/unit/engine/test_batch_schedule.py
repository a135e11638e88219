"""Batches that grow: which step has how many samples, by pure arithmetic, and what is refused before anything starts."""

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.data.order import Position, take
from shoal.engine.batches.schedule import all_batches, batch_at, batch_problems, most_microbatches, next_level
from shoal.engine.callbacks.adapt_rules import adapt_problems
from shoal.engine.config import TrainConfig
from shoal.engine.resolve import count_steps, resolve_plan
from shoal.optim.config import OptimConfig

LISTED = TrainConfig(steps=9, batch_schedule=[[0, 8], [3, 16], [5, 32]])
NOISY = TrainConfig(steps=9, global_batch=8, batch_schedule="noise", batch_every=10, batch_limit=40)


def test_a_step_has_the_batch_of_the_last_change_before_it():
    assert [batch_at(LISTED, step) for step in range(7)] == [8, 8, 8, 16, 16, 32, 32]
    assert LISTED.global_batch == 8, "the first batch is the global batch where that is not given"
    assert all_batches(LISTED) == (8, 16, 32) and all_batches(NOISY) == (8, 16, 32)
    assert batch_at(NOISY, 999, level=2) == 32


def test_noise_doubles_when_twice_the_batch_is_not_above_the_noise_scale():
    assert next_level(NOISY, 10, 0, 16.0) == 1
    assert next_level(NOISY, 10, 0, 15.9) == 0
    assert next_level(NOISY, 11, 0, 99.0) == 0, "only every batch_every steps"
    assert next_level(NOISY, 10, 2, 999.0) == 2, "64 is above batch_limit 40"
    assert next_level(NOISY, 10, 1, None) == 1 and next_level(LISTED, 10, 0, 999.0) == 0


@pytest.mark.parametrize("length", [{"epochs": 1.0}, {"epochs": 2.5}, {"tokens": 700}])
def test_epochs_and_tokens_are_counted_in_steps_of_the_schedule(length):
    train = TrainConfig(**length, batch_schedule=[[0, 8], [3, 16], [5, 32]])
    steps = count_steps(train, num_samples=70, tokens_per_sample=4)
    wanted = 70 * length["epochs"] if "epochs" in length else 700 / 4
    position, seen = Position(), []
    for step in range(steps):
        span, position = take(position, 70, batch_at(train, step))
        seen.append(span.stop - span.start)
    assert sum(seen) >= wanted > sum(seen[:-1])


def test_microbatches_keep_their_size_and_grow_in_number():
    resolved = resolve_plan(LISTED, Plan.parse("dp=2"))
    assert (resolved.micro_batch, resolved.plan.microbatches) == (4, 1)
    assert most_microbatches(LISTED, resolved.plan) == 4
    falling = TrainConfig(steps=9, batch_schedule=[[0, 32], [3, 8]])
    assert resolve_plan(falling, Plan.parse("dp=2")).micro_batch == 4, "the smallest batch is one microbatch"
    assert resolve_plan(LISTED, Plan.parse("dp=1 pp=2 microbatches=4")).micro_batch == 2


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"batch_schedule": []}, ["[] is none", "[[0, 64], [2000, 128]]"]),
        ({"batch_schedule": "often"}, ["'often' is none", '"noise"']),
        ({"batch_schedule": [[1, 8]]}, ["[1]", "begin with 0"]),
        ({"batch_schedule": [[0, 8], [4, 16], [4, 32]]}, ["[0, 4, 4]", "rise"]),
        ({"batch_schedule": [[0, 8], [4, 0]]}, ["a batch of 0"]),
        ({"batch_schedule": [[0, 8.5]]}, ["is none"]),
        ({"batch_schedule": [[0, 8]], "global_batch": 16}, ["global_batch 16", "8", "leave global_batch out"]),
        ({"batch_schedule": "noise", "global_batch": 16, "batch_limit": 8}, ["batch_limit 8", "global_batch 16"]),
    ],
)
def test_a_wrong_schedule_gets_one_message_with_the_numbers(train, words):
    with pytest.raises(RequestError) as refusal:
        validate(TrainConfig, {"steps": 3, **train}, origin="recipe")
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("plan", "schedule", "words"),
    [
        ("dp=2", [[0, 8], [3, 12]], ["batch of 12", "8", "8 or 16", "train.micro_batch"]),
        ("dp=3", [[0, 9], [3, 18], [5, 20]], ["batch of 20", "18 or 27"]),
    ],
)
def test_a_batch_that_microbatches_do_not_make_up_is_refused(plan, schedule, words):
    train = TrainConfig(steps=9, batch_schedule=schedule, micro_batch=4 if plan == "dp=2" else None)
    with pytest.raises(RequestError) as refusal:
        resolve_plan(train, Plan.parse(plan))
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("plan", "train", "optim", "words"),
    [
        ("ps=1 workers=2", {"batch_schedule": [[0, 8]]}, {}, ["2 workers", "use a plan with dp"]),
        ("pp=2 schedule=pipedream", {"batch_schedule": [[0, 8]]}, {}, ["pipedream", "schedule=1f1b"]),
        ("dp=2 sync=local:3", {"batch_schedule": [[0, 8]]}, {}, ["2 islands", "leave one of the two out"]),
        ("dp=2", {"batch_schedule": "noise"}, {}, ["optim.adapt none", "set optim.adapt to noise"]),
        ("dp=2", {"batch_schedule": "noise", "steps": None, "epochs": 2}, {"adapt": "noise"}, ["set train.steps"]),
        ("ps=1 workers=2", {}, {"hold_half_life": True}, ["optim.hold_half_life", "use a plan with dp"]),
        ("ps=1 workers=2", {}, {"scale": "sqrt", "scale_base": 4}, ["optim.scale sqrt"]),
        ("ps=1 workers=2", {}, {"adapt": "hyper"}, ["optim.adapt hyper"]),
        ("dp=2", {}, {"adapt": "bold"}, ["eval.every is 0", "set eval.every"]),
        ("dp=1 pp=2 microbatches=2", {}, {"adapt": "noise"}, ["under pp", "use dp, zero and tp"]),
        ("dp=1 cp=2 microbatches=2", {}, {"adapt": "adascale", "scale_base": 2}, ["under cp"]),
        ("dp=1", {}, {"adapt": "noise"}, ["a step has 1", "global_batch 8", "train.micro_batch to 4"]),
        ("dp=2", {}, {"adapt": "adascale", "scale_base": 16}, ["global_batch 8 is below 16"]),
        (
            "dp=2",
            {"steps": None, "epochs": 1},
            {"adapt": "adascale", "scale_base": 2},
            ["not in epochs", "train.steps"],
        ),
        ("pp=2 schedule=pipedream microbatches=2", {}, {"adapt": "hyper"}, ["schedule=pipedream"]),
        ("dp=2 sync=local:3", {}, {"adapt": "hyper"}, ["2 islands", "use adapt bold"]),
    ],
)
def test_what_a_plan_cannot_adapt_is_refused_with_the_fix(plan, train, optim, words):
    config = TrainConfig(**{"steps": 9, "global_batch": 8, **train})
    resolved = resolve_plan(config, Plan.parse(plan)).plan if "ps" not in plan else Plan.parse(plan)
    found = "\n".join(adapt_problems(OptimConfig(**optim), config, resolved, evaluate_every=0))
    assert all(word in found for word in words), found


def test_a_schedule_that_fits_is_not_refused():
    assert not list(batch_problems(LISTED, OptimConfig(), Plan.parse("dp=2 zero=3")))
    assert not list(batch_problems(NOISY, OptimConfig(adapt="noise"), Plan.parse("dp=2 microbatches=2")))


def test_the_half_life_is_of_a_second_moment():
    with pytest.raises(RequestError, match="momentum has none"):
        validate(OptimConfig, {"name": "momentum", "hold_half_life": True}, origin="recipe")
