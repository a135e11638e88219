"""Stages of several ranks that take turns, against one process, bit for bit; and bugs of their sums that are seen."""

import functools

import pytest
import torch

import shoal.pipeline.share as share
from pipeline_cases import cut, train_alone, train_in_turns
from shoal.testing.ranks import run_on_ranks

STEPS = 5
# (model, ranks, then schedule and ranks of every stage). 3-1 deals eight microbatches as 3, 3 and 2.
CASES = {
    ("gpt", 3): [("1f1b", (2, 1)), ("1f1b", (1, 2)), ("gpipe", (2, 1))],
    ("tied gpt", 3): [("1f1b", (2, 1)), ("1f1b", (1, 2))],
    ("gpt", 4): [("1f1b", (2, 1, 1)), ("1f1b", (1, 2, 1)), ("1f1b", (3, 1)), ("pipedream-flush", (2, 2))],
    ("tied gpt", 4): [("1f1b", (2, 1, 1)), ("1f1b", (1, 1, 2)), ("gpipe", (2, 2))],
}
SOAK = ("tied gpt", 4)
EACH = [
    pytest.param(*key, "-".join([name, *map(str, replicas)]), marks=pytest.mark.soak if key == SOAK else ())
    for key, cases in CASES.items()
    for name, replicas in cases
]


@functools.cache
def outcomes(kind, num_ranks):
    return run_on_ranks(train_in_turns, num_ranks, kind, CASES[kind, num_ranks], STEPS, deadline_seconds=100.0)


@pytest.mark.parametrize(("kind", "num_ranks", "case"), EACH)
def test_replicated_stages_equal_one_process(kind, num_ranks, case):
    """Gradients and weights of every copy, with dropout and a shorter last microbatch."""
    assert [found[case] for found in outcomes(kind, num_ranks)] == [None] * num_ranks


def sum_nothing(world):
    share.places_of = lambda grid, stages: ()
    return train_in_turns(world, "gpt", [("1f1b", (2, 1))], 1)


def test_replicas_that_are_not_summed_are_seen_and_the_other_stage_is_right():
    first, second, last = (found["1f1b-2-1"] for found in run_on_ranks(sum_nothing, 3, deadline_seconds=60.0))
    assert first.startswith("step 0: gradient of") and second.startswith("step 0: gradient of") and last is None


def sum_in_another_order(world):
    honest = share.places_of
    share.places_of = lambda grid, stages: honest(grid, stages)[::-1]
    return train_in_turns(world, "tied gpt", [("1f1b", (2, 1))], 1)


def test_an_order_of_sums_that_is_not_the_plans_is_seen():
    """Three terms of the tied weight: from the other end they come to other bits."""
    found = run_on_ranks(sum_in_another_order, 3, deadline_seconds=60.0)
    assert [one["1f1b-2-1"] for one in found] == ["step 0: gradient of embedding.weight"] * 3


def take_the_others_microbatch(runtime, rank):
    """The two ranks of the first stage change their first microbatches."""
    step = runtime.step

    def swapped(feed):
        inputs = feed.inputs
        feed.inputs = lambda microbatch: inputs(microbatch ^ 1 if rank < 2 and microbatch < 2 else microbatch)
        return feed

    runtime.step = lambda feed, **options: step(swapped(feed), **options)


def train_on_the_others(world):
    return train_in_turns(world, "gpt", [("1f1b", (2, 1))], 2, plant=take_the_others_microbatch)


def test_a_microbatch_on_the_wrong_rank_is_seen():
    assert all(found["1f1b-2-1"] for found in run_on_ranks(train_on_the_others, 3, deadline_seconds=60.0))


def test_turns_come_to_other_bits_than_one_sum():
    """Else a run that ignores its turns would pass."""
    turns = {path: [2] for path in cut("gpt", 2)[0].holders()}
    (one, _), (two, _) = (train_alone("gpt", halves=False, steps=1, turns=own)[0] for own in (None, turns))
    assert any(not torch.equal(one[path], two[path]) for path in turns)
    for path in turns:
        torch.testing.assert_close(one[path], two[path], rtol=1e-4, atol=1e-6)
