"""Pipelines against one process, bit for bit: synchronous schedules, and asynchronous ones by the papers' rules."""

import functools

import pytest
import torch

import shoal.pipeline.share as share
from shoal.schedules.catalogue import FAMILIES, make_schedule
from shoal.testing.ranks import run_on_ranks
from support.pipeline.stages_on_ranks import MICROBATCHES, train_all, train_alone, train_delayed, train_in_stages

SYNCHRONOUS = [name for name, family in FAMILIES.items() if not family.updates.are_asynchronous]
ASYNCHRONOUS = [name for name, family in FAMILIES.items() if family.updates.are_asynchronous]
STEPS = 5


TIED = ["1f1b", "interleaved", "zbv", "chimera"]  # One of each way of laying stages over ranks.


@functools.cache
def outcomes(kind, num_ranks):
    names = TIED if kind == "tied gpt" else SYNCHRONOUS
    return run_on_ranks(train_all, num_ranks, kind, names, STEPS, deadline_seconds=100.0)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("gpt", 2),
        pytest.param("cnn", 4, marks=pytest.mark.soak),
        pytest.param("gpt", 4, marks=pytest.mark.soak),
        pytest.param("cnn", 2, marks=pytest.mark.soak),
    ],
)
def test_a_synchronous_schedule_equals_one_process(kind, num_ranks, name):
    assert [found[name] for found in outcomes(kind, num_ranks)] == [None] * num_ranks


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_are_summed_by_use_and_direction(name):
    assert [found[name] for found in outcomes("tied gpt", 2)] == [None] * 2


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize(("kind", "num_ranks"), [("gpt", 2), pytest.param("cnn", 4, marks=pytest.mark.soak)])
def test_an_asynchronous_schedule_equals_the_papers_rule(kind, num_ranks, name):
    """Also when the pipeline is drained and filled again in between, as it is for a checkpoint."""
    found = run_on_ranks(train_delayed, num_ranks, kind, name, [2, 1, 2], deadline_seconds=100.0)
    assert found == [None] * num_ranks


def swap_microbatches(runtime, rank):
    inputs = {}

    def swapped(feed):
        inputs["of"] = feed.inputs
        feed.inputs = lambda microbatch: inputs["of"](microbatch ^ 1 if microbatch < 2 else microbatch)
        return feed

    step = runtime.step
    runtime.step = lambda feed, **options: step(swapped(feed), **options)


def lose_a_gradient(runtime, rank):
    weight = runtime._weight

    def forget(state, action):
        if rank == 1 and action.microbatch == 1:
            state.kept.pop((action.stage, action.microbatch))
            return
        weight(state, action)

    runtime._weight = forget


PLANTS = {"swapped microbatches": swap_microbatches, "a lost gradient": lose_a_gradient}


def train_with_a_bug(world, name, bug):
    torch.set_num_threads(1)
    references = {halves: train_alone("gpt", halves=halves, steps=2) for halves in (False, True)}
    schedule = make_schedule(name, ranks=world.size, microbatches=MICROBATCHES)
    return train_in_stages(world, "gpt", schedule, references, steps=2, plant=PLANTS[bug])


@pytest.mark.parametrize(("name", "bug"), [("1f1b", "swapped microbatches"), ("zb-h1", "a lost gradient")])
def test_a_planted_bug_is_seen(name, bug):
    assert any(run_on_ranks(train_with_a_bug, 2, name, bug, deadline_seconds=60.0))


def be_one_late(runtime, rank):
    used = runtime.versions.rule.__class__.used
    if not hasattr(used, "is_late"):
        late = lambda rule, stage, microbatch: max(0, used(rule, stage, microbatch) - 1)  # noqa: E731
        late.is_late = True
        runtime.versions.rule.__class__.used = late


def train_one_late(world, name):
    return train_delayed(world, "gpt", name, [3], plant=be_one_late)


@pytest.mark.parametrize(
    "name", ["pipedream", *(pytest.param(name, marks=pytest.mark.soak) for name in ASYNCHRONOUS if name != "pipedream")]
)
def test_a_wrong_version_is_seen(name):
    assert any(run_on_ranks(train_one_late, 2, name, deadline_seconds=60.0))


def sum_nothing(world, kind):
    share.places_of = lambda grid, stages: ()
    return train_all(world, kind, ["1f1b", "chimera"], 1)


def test_a_tied_weight_that_is_not_summed_is_seen():
    for found in run_on_ranks(sum_nothing, 2, "tied gpt", deadline_seconds=60.0):
        assert found["1f1b"] == "step 0: gradient of embedding.weight"
        assert found["chimera"] is not None


def observe_step(world, name):
    """What differs from one process with an observer, and what it was told."""
    torch.set_num_threads(1)
    told = []

    def watch(runtime, rank):
        runtime.observe = lambda action, *times: told.append([str(action), *times])

    references = {False: train_alone("gpt", halves=False, steps=1)}
    schedule = make_schedule(name, ranks=world.size, microbatches=MICROBATCHES)
    world.barrier()
    return train_in_stages(world, "gpt", schedule, references, steps=1, plant=watch), told


def test_an_observer_is_told_of_every_action_in_order_and_changes_no_bit():
    name = "zb-h1"
    found = run_on_ranks(observe_step, 2, name)
    assert [difference for difference, _ in found] == [None, None]
    schedule = make_schedule(name, ranks=2, microbatches=MICROBATCHES)
    began = {action: begin for _, told in found for action, begin, _, _ in told}
    for rank, (_, told) in enumerate(found):
        assert [action for action, *_ in told] == [str(action) for action in schedule.actions(rank)]
        ends = [end for *_, end in told]
        # A endpoint's first message takes two messages from the moment that it is asked for.
        assert max(waited for _, _, waited, _ in told) > 2e-5
        for (action, begin, waited, end), before in zip(told, [0.0, *ends], strict=False):
            assert before <= begin <= begin + waited < end
            # The clock is one for both ranks: what is received was begun before it was received.
            if rank == 1 and "F" in action:
                assert began[f"0{action[1:]}"] < begin + waited
