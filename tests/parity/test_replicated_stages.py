"""Stages of several ranks that take turns, against one process, bit for bit; and bugs of their sums that are seen."""

import functools

import pytest
import torch

import shoal.pipeline.share as share
from shoal.testing.ranks import run_on_ranks
from support.pipeline.stages_on_ranks import cut, train_alone, train_in_turns

STEPS = 5
# By number of ranks and model: schedule and ranks of every stage. 3-1 deals eight microbatches as 3, 3 and 2.
CASES = {
    3: {
        "gpt": [("1f1b", (2, 1)), ("1f1b", (1, 2)), ("gpipe", (2, 1))],
        "tied gpt": [("1f1b", (2, 1)), ("1f1b", (1, 2))],
        "spare gpt": [("1f1b", (2, 1))],
    },
    4: {"gpt": [("1f1b", (2, 1, 1)), ("1f1b", (1, 2, 1)), ("1f1b", (3, 1)), ("pipedream-flush", (2, 2))]},
}
MORE = {4: {"tied gpt": [("1f1b", (2, 1, 1)), ("1f1b", (1, 1, 2)), ("gpipe", (2, 2))]}}


def each(cases):
    """The cases as rows; those of four ranks are for the long run."""
    return [
        pytest.param(
            num_ranks, kind, "-".join([name, *map(str, replicas)]), marks=[pytest.mark.soak] if num_ranks > 2 else []
        )
        for num_ranks, by_kind in cases.items()
        for kind, own in by_kind.items()
        for name, replicas in own
    ]


def train_kinds(world, by_kind):
    return {kind: train_in_turns(world, kind, cases, STEPS) for kind, cases in by_kind.items()}


@functools.cache
def outcomes(num_ranks, *, more=False):
    cases = (MORE if more else CASES)[num_ranks]
    return run_on_ranks(train_kinds, num_ranks, cases, deadline_seconds=110.0)


@pytest.mark.parametrize(("num_ranks", "kind", "case"), each(CASES))
def test_replicated_stages_equal_one_process(num_ranks, kind, case):
    """Gradients and weights of every copy, with dropout and a shorter last microbatch."""
    assert [found[kind][case] for found in outcomes(num_ranks)] == [None] * num_ranks


@pytest.mark.soak
@pytest.mark.parametrize(("num_ranks", "kind", "case"), each(MORE))
def test_more_replicated_stages_equal_one_process(num_ranks, kind, case):
    assert [found[kind][case] for found in outcomes(num_ranks, more=True)] == [None] * num_ranks


def take_the_others_microbatch(runtime, rank):
    """The two ranks of the first stage change their first microbatches."""
    step = runtime.step

    def swapped(feed):
        inputs = feed.inputs
        feed.inputs = lambda microbatch: inputs(microbatch ^ 1 if rank < 2 and microbatch < 2 else microbatch)
        return feed

    runtime.step = lambda feed, **options: step(swapped(feed), **options)


def train_with_bugs(world):
    """What differs under each bug, and without one after all of them."""
    honest, case, found = share.places_of, [("1f1b", (2, 1))], {}
    share.places_of = lambda grid, stages: ()
    found["nothing summed"] = train_in_turns(world, "gpt", case, 1)
    share.places_of = lambda grid, stages: honest(grid, stages)[::-1]
    found["another order"] = train_in_turns(world, "tied gpt", case, 1)
    share.places_of = honest
    found["others' microbatches"] = train_in_turns(world, "gpt", case, 2, plant=take_the_others_microbatch)
    pack = share.SharedGradients._pack
    share.SharedGradients._pack = lambda self, keys: torch.cat(
        [(own := pack(self, keys))[: -len(keys)], own.new_ones(len(keys))]
    )
    found["zeros for nothing"] = train_in_turns(world, "spare gpt", case, 1)
    share.SharedGradients._pack = pack
    found["none"] = train_in_turns(world, "tied gpt", case, 1)
    return {bug: difference["1f1b-2-1"] for bug, difference in found.items()}


def test_planted_bugs_are_seen():
    """Sums left out are seen on both ranks of the stage, and the other stage is right; the tied weight has three terms, which
    from the other end come to other bits; a microbatch on the wrong rank is seen by all; a weight that no microbatch touches
    has no gradient in one process, where zeros would have it decay."""
    ranks = run_on_ranks(train_with_bugs, 3, deadline_seconds=100.0)
    first, second, last = (found["nothing summed"] for found in ranks)
    assert first.startswith("step 0: gradient of") and second.startswith("step 0: gradient of") and last is None
    assert [found["another order"] for found in ranks] == ["step 0: gradient of embedding.weight"] * 3
    assert all(found["others' microbatches"] for found in ranks)
    assert [found["zeros for nothing"] for found in ranks] == [*["step 0: gradient of blocks.0.spare"] * 2, None]
    assert [found["none"] for found in ranks] == [None] * 3, "the control"


def test_turns_come_to_other_bits_than_one_sum():
    """Else a run that ignores its turns would pass."""
    turns = {path: [2] for path in cut("gpt", 2)[0].holders()}
    (one, _), (two, _) = (train_alone("gpt", halves=False, steps=1, turns=own)[0] for own in (None, turns))
    assert any(not torch.equal(one[path], two[path]) for path in turns)
    for path in turns:
        torch.testing.assert_close(one[path], two[path], rtol=1e-4, atol=1e-6)
