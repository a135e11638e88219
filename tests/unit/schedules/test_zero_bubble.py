"""ZB-H1 and ZB-H2 against the figures of arXiv 2401.10241, sections 2.1 and 2.2: waits, length and activations."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.schedules.families.family import Family, Size
from shoal.schedules.families.one_f_one_b import ONE_F_ONE_B
from shoal.schedules.families.zero_bubble import ZB_H1, ZB_H2
from shoal.schedules.player import Timeline, peak_activations
from shoal.schedules.pricing import Costs, price
from shoal.schedules.rules import check
from shoal.schedules.schedule import Grid, Kind, Schedule
from support.schedules.sizes import EVERY, sweep

BOTH = pytest.mark.parametrize("family", [ZB_H1, ZB_H2], ids=lambda family: family.name)
SIZES = st.sampled_from([Size(*pair, 1) for pair in EVERY])


@cache
def schedule_of(family: Family, size: Size) -> Schedule:
    """A schedule with the bounds that the family promises."""
    return Schedule(
        name=family.name,
        grid=Grid(family.fold, size.ranks, size.stages, size.microbatches),
        rows=family.rows(size),
        activation_bound=tuple(family.activations(size, rank) for rank in range(size.ranks)),
    )


@cache
def timeline_of(family: Family, size: Size) -> Timeline:
    return price(schedule_of(family, size))


def words(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{action.kind}{action.microbatch}" for action in schedule.actions(rank))


def waits(timeline: Timeline) -> list[float]:
    return [timeline.idle_in_own_span(rank) for rank in range(len(timeline.spans))]


@BOTH
@sweep()
def test_every_size_is_legal_and_as_short_as_any_order_can_be(family, pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        schedule = schedule_of(family, size)
        check(schedule)
        ranks, microbatches = size.ranks, size.microbatches
        # The last rank begins after P-1; its last I is followed by P-1 others and a W.
        least = max(3 * microbatches + ranks - 1, 2 * microbatches + 2 * ranks - 1)
        assert timeline_of(family, size).makespan == least, size


@sweep()
def test_h1_loses_one_cell_per_other_rank_from_as_many_microbatches_as_ranks_on(pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        makespan = timeline_of(ZB_H1, size).makespan
        lost = makespan - 3 * size.microbatches
        assert (lost == size.ranks - 1) is (size.microbatches >= size.ranks), size


@sweep()
def test_h1_waits_a_third_of_what_1f1b_does(pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        if size.microbatches >= size.ranks:
            thirds = [wait / 3 for wait in waits(timeline_of(ONE_F_ONE_B, size))]
            assert waits(timeline_of(ZB_H1, size)) == thirds, size


@sweep()
def test_h2_never_waits_once_begun_from_two_microbatches_per_rank_less_one_on(pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        most = max(waits(timeline_of(ZB_H2, size)))
        # With fewer, the first rank has nothing to do until the first gradient is back, and no order can help.
        assert most == max(0, 2 * size.ranks - 1 - size.microbatches), size


@sweep()
def test_h1_holds_no_more_than_the_first_rank_of_1f1b(pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        fullest = max(peak_activations(schedule_of(ONE_F_ONE_B, size)))
        assert peak_activations(schedule_of(ZB_H1, size)) == (fullest,) * size.ranks
        assert fullest == min(size.microbatches, size.ranks)


@sweep()
def test_h2_holds_two_microbatches_per_rank_less_one(pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        held = min(size.microbatches, 2 * size.ranks - 1)
        assert peak_activations(schedule_of(ZB_H2, size)) == (held,) * size.ranks


@BOTH
@sweep()
def test_the_promised_activations_are_those_that_are_held(family, pairs):
    for size in (Size(*pair, 1) for pair in pairs):
        schedule = schedule_of(family, size)
        assert schedule.activation_bound == peak_activations(schedule), size


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 8),
    more=st.integers(0, 16),
    forward=st.floats(1, 4),
    gradient=st.floats(1, 4),
    weight=st.floats(0.125, 1),
)
def test_waits_are_the_papers_formulas_while_a_weight_gradient_is_the_shortest_cell(
    ranks, more, forward, gradient, weight
):
    costs = Costs(forward=forward, input=gradient, weight=weight)
    for family, times, first in ((ZB_H1, 1, ranks), (ZB_H2, 2, 2 * ranks - 1)):
        timeline = price(schedule_of(family, Size(ranks, first + more, 1)), costs)
        each = forward + gradient - times * weight
        assert waits(timeline) == pytest.approx([(ranks - 1 - rank) * each for rank in range(ranks)], abs=1e-9)


@BOTH
@settings(max_examples=40, deadline=None)
@given(size=SIZES)
def test_unequal_costs_and_slow_transfers_still_come_to_the_end(family, size):
    schedule = schedule_of(family, size)
    timeline = price(schedule, Costs(forward=1, input=1.3, weight=0.7, transfer=0.1))
    assert list(map(len, timeline.spans)) == list(map(len, schedule.rows))
    assert timeline.makespan >= 3 * size.microbatches + 1.1 * (size.ranks - 1) - 1e-9


@BOTH
@settings(max_examples=40, deadline=None)
@given(size=SIZES)
def test_no_backward_is_whole_and_weights_gradients_come_in_the_order_of_microbatches(family, size):
    for rank in range(size.ranks):
        actions = list(schedule_of(family, size).actions(rank))
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(size.microbatches))
        assert len(actions) == 3 * size.microbatches


def test_h1_puts_off_a_weight_gradient_more_on_each_later_rank():
    schedule = schedule_of(ZB_H1, Size(3, 4, 1))
    assert words(schedule, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert words(schedule, 1) == "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
    assert words(schedule, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_h2_runs_two_microbatches_ahead_per_rank_that_comes_after():
    schedule = schedule_of(ZB_H2, Size(2, 4, 1))
    assert words(schedule, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert words(schedule, 1) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


@BOTH
def test_one_rank_and_one_microbatch_put_nothing_off(family):
    assert words(schedule_of(family, Size(1, 2, 1)), 0) == "F0 I0 W0 F1 I1 W1"
    single = schedule_of(family, Size(4, 1, 1))
    assert [words(single, rank) for rank in range(4)] == ["F0 I0 W0"] * 4
