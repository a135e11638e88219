"""GPipe and 1F1B against their papers' figures: length, bubble and activations."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.schedules.families.family import Family, Size
from shoal.schedules.families.one_f_one_b import GPIPE, ONE_F_ONE_B
from shoal.schedules.player import peak_activations
from shoal.schedules.pricing import Costs, price
from shoal.schedules.rules import check
from shoal.schedules.schedule import Grid, Schedule
from support.schedules.sizes import EVERY, sweep

BOTH = pytest.mark.parametrize("family", [GPIPE, ONE_F_ONE_B], ids=lambda family: family.name)
SIZES = st.sampled_from([Size(*pair, 1) for pair in EVERY])
COSTS = st.floats(0.125, 8)


@cache
def schedule_of(family: Family, size: Size) -> Schedule:
    """A schedule with the bounds that the family promises."""
    return Schedule(
        name=family.name,
        grid=Grid(family.fold, size.ranks, size.stages, size.microbatches),
        rows=family.rows(size),
        activation_bound=tuple(family.activations(size, rank) for rank in range(size.ranks)),
    )


def words(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.actions(rank)))


@BOTH
@sweep()
def test_every_size_is_legal_and_takes_three_times_the_microbatches_and_the_other_ranks(family, pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        schedule = schedule_of(family, size)
        check(schedule)
        timeline = price(schedule)
        assert timeline.makespan == 3 * (size.microbatches + size.ranks - 1), size
        share = (size.ranks - 1) / (size.microbatches + size.ranks - 1)
        assert timeline.bubble == pytest.approx(share), size


@sweep()
def test_gpipe_holds_every_microbatch_and_1f1b_those_between_a_rank_and_the_end(pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        assert peak_activations(schedule_of(GPIPE, size)) == (size.microbatches,) * size.ranks
        held = tuple(min(size.microbatches, size.ranks - rank) for rank in range(size.ranks))
        assert peak_activations(schedule_of(ONE_F_ONE_B, size)) == held


@BOTH
@sweep()
def test_the_promised_activations_are_those_that_are_held(family, pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        schedule = schedule_of(family, size)
        assert schedule.activation_bound == peak_activations(schedule), size


@BOTH
@settings(max_examples=40, deadline=None)
@given(size=SIZES, forward=COSTS, gradient=COSTS, weight=COSTS)
def test_the_bubble_is_a_forward_and_a_backward_per_other_rank_at_any_costs(family, size, forward, gradient, weight):
    timeline = price(schedule_of(family, size), Costs(forward=forward, input=gradient, weight=weight))
    each = forward + gradient + weight
    assert timeline.makespan == pytest.approx((size.microbatches + size.ranks - 1) * each)


@BOTH
@settings(max_examples=40, deadline=None)
@given(size=SIZES)
def test_unequal_costs_and_slow_transfers_still_come_to_the_end(family, size):
    schedule = schedule_of(family, size)
    timeline = price(schedule, Costs(forward=1, input=1.3, weight=0.7, transfer=0.1))
    assert list(map(len, timeline.spans)) == list(map(len, schedule.rows))
    # Out and back through the other ranks, at the least.
    least = (size.microbatches + size.ranks - 1) * 3 + 2 * 0.1 * (size.ranks - 1)
    assert timeline.makespan >= least - 1e-9


def test_gpipe_does_all_forwards_first():
    schedule = schedule_of(GPIPE, Size(2, 3, 1))
    assert words(schedule, 0) == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert words(schedule, 1) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_1f1b_alternates_after_a_warm_up():
    schedule = schedule_of(ONE_F_ONE_B, Size(3, 4, 1))
    assert words(schedule, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert words(schedule, 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert words(schedule, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


@BOTH
def test_one_microbatch_goes_out_and_back(family):
    schedule = schedule_of(family, Size(4, 1, 1))
    assert [words(schedule, rank) for rank in range(4)] == ["0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"]


def test_one_rank_needs_no_warm_up():
    assert words(schedule_of(ONE_F_ONE_B, Size(1, 3, 1)), 0) == "0F0 0B0 0F1 0B1 0F2 0B2"
