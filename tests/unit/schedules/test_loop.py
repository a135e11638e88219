"""Interleaved 1F1B and the breadth-first loop: the papers' figures, and the least length where the papers say nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.schedules.families.family import Family, Size
from shoal.schedules.families.one_f_one_b import GPIPE, INTERLEAVED, LOOPED_BFS, ONE_F_ONE_B
from shoal.schedules.player import peak_activations
from shoal.schedules.pricing import Costs, price
from shoal.schedules.rules import check
from shoal.schedules.schedule import Grid, Kind, Schedule
from support.schedules.sizes import sweep

BOTH = pytest.mark.parametrize("family", [INTERLEAVED, LOOPED_BFS], ids=lambda family: family.name)
SIZES = st.builds(Size, st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
SMALL_SIZES = [
    Size(ranks, microbatches, chunks)
    for ranks in range(1, 6)
    for microbatches in range(1, 14)
    for chunks in range(1, 4)
]


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


def least_length(size: Size) -> int:
    """No order takes less: the last rank's work with P-1 before and after, or the last stage's with all others."""
    ranks, microbatches, chunks = size.ranks, size.microbatches, size.chunks
    return 3 * max(chunks * microbatches + ranks - 1, chunks * ranks + microbatches - 1)


@BOTH
def test_every_small_size_is_legal_and_as_short_as_any_order_can_be(family):
    for size in SMALL_SIZES:
        schedule = schedule_of(family, size)
        check(schedule)
        assert price(schedule).makespan == least_length(size), size


@BOTH
@sweep()
def test_every_size_of_two_chunks_is_as_short_as_any_order_can_be(family, pairs):
    for size in (Size(*pair, 2) for pair in pairs):
        assert price(schedule_of(family, size)).makespan == least_length(size), size


@BOTH
@settings(max_examples=40, deadline=None)
@given(size=SIZES)
def test_any_size_is_legal_and_shortest_and_holds_what_it_promises(family, size):
    schedule = schedule_of(family, size)
    check(schedule)
    assert price(schedule).makespan == least_length(size)
    assert schedule.activation_bound == peak_activations(schedule)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 8), rounds=st.integers(1, 4), chunks=st.integers(2, 4))
def test_interleaved_has_the_papers_length_and_activations_when_ranks_divide_microbatches(ranks, rounds, chunks):
    microbatches = ranks * rounds
    schedule = schedule_of(INTERLEAVED, Size(ranks, microbatches, chunks))
    assert price(schedule).makespan == 3 * (chunks * microbatches + ranks - 1)
    ahead = [2 * (ranks - rank - 1) + (chunks - 1) * ranks for rank in range(ranks)]
    assert peak_activations(schedule) == tuple(min(chunks * microbatches, more + 1) for more in ahead)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 8), rounds=st.integers(1, 4), chunks=st.integers(1, 4))
def test_the_bubble_is_smaller_than_that_of_1f1b_by_the_number_of_chunks(ranks, rounds, chunks):
    def lost(family: Family, chunks: int, costs: Costs) -> float:
        timeline = price(schedule_of(family, Size(ranks, ranks * rounds, chunks)), costs)
        return timeline.makespan - timeline.busy(0)

    # The same model: a stage is a chunk's share of what it is with one stage per rank.
    share = Costs(forward=1 / chunks, input=1 / chunks, weight=1 / chunks)
    assert lost(INTERLEAVED, chunks, share) == pytest.approx(lost(ONE_F_ONE_B, 1, Costs()) / chunks)


@settings(max_examples=40, deadline=None)
@given(size=SIZES)
def test_interleaved_holds_less_than_twice_as_much_when_ranks_do_not_divide_microbatches(size):
    held = peak_activations(schedule_of(INTERLEAVED, size))
    for rank, peak in enumerate(held):
        # A group is shorter than two rounds of ranks.
        assert peak <= 2 * (size.ranks - rank - 1) + (size.chunks - 1) * (2 * size.ranks - 1) + 1
        assert peak <= size.chunks * size.microbatches


@BOTH
@settings(max_examples=40, deadline=None)
@given(size=SIZES)
def test_unequal_costs_and_slow_transfers_still_come_to_the_end(family, size):
    schedule = schedule_of(family, size)
    timeline = price(schedule, Costs(forward=1, input=1.3, weight=0.7, transfer=0.1))
    assert list(map(len, timeline.spans)) == list(map(len, schedule.rows))
    assert timeline.makespan >= least_length(size) + 0.2 * (size.ranks - 1) - 1e-9


@settings(max_examples=40, deadline=None)
@given(rounds=st.integers(2, 4), ranks=st.integers(2, 8))
def test_the_second_forward_ahead_per_rank_hides_transfers(ranks, rounds):
    """1F1B waits out and back in every microbatch; interleaved has a spare forward for that time."""
    microbatches = ranks * rounds
    slow = Costs(transfer=0.25)
    line = price(schedule_of(ONE_F_ONE_B, Size(ranks, microbatches, 1)), slow).makespan - 3 * (microbatches + ranks - 1)
    loop = price(schedule_of(INTERLEAVED, Size(ranks, microbatches, 2)), slow).makespan
    per_cell = (loop - 3 * (2 * microbatches + ranks - 1)) / (2 * microbatches)
    assert per_cell < line / microbatches


@settings(max_examples=40, deadline=None)
@given(size=SIZES)
def test_breadth_first_holds_everything_and_comes_to_a_chunk_twice(size):
    schedule = schedule_of(LOOPED_BFS, size)
    assert peak_activations(schedule) == (size.chunks * size.microbatches,) * size.ranks
    for rank in range(size.ranks):
        actions = list(schedule.actions(rank))
        visits = [actions[index].stage for index in range(0, len(actions), size.microbatches)]
        stages = [chunk * size.ranks + rank for chunk in range(size.chunks)]
        assert visits == stages + stages[::-1]
        assert [a.stage for a in actions] == [stage for stage in visits for _ in range(size.microbatches)]
        assert {a.kind for a in actions[: len(actions) // 2]} == {Kind.FORWARD}


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 32))
def test_with_one_chunk_they_are_1f1b_and_gpipe(ranks, microbatches):
    size = Size(ranks, microbatches, 1)
    assert INTERLEAVED.rows(size) == ONE_F_ONE_B.rows(size)
    assert LOOPED_BFS.rows(size) == GPIPE.rows(size)


def test_a_group_goes_through_all_chunks_before_the_next_group():
    schedule = schedule_of(INTERLEAVED, Size(2, 4, 2))
    assert words(schedule, 0) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert words(schedule, 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_microbatches_left_over_make_groups_larger():
    forwards = [a for a in schedule_of(INTERLEAVED, Size(2, 5, 2)).actions(1) if a.kind is Kind.FORWARD]
    assert " ".join(map(str, forwards)) == "1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4"


def test_breadth_first_goes_back_through_the_last_chunk_first():
    assert words(schedule_of(LOOPED_BFS, Size(2, 2, 2)), 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"


@BOTH
def test_one_rank_and_one_microbatch_go_through_every_stage(family):
    assert words(schedule_of(family, Size(1, 1, 3)), 0) == "0F0 1F0 2F0 2B0 1B0 0B0"
    single = schedule_of(family, Size(2, 1, 2))
    assert [words(single, rank) for rank in range(2)] == ["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]


def test_one_rank_holds_as_many_activations_as_it_has_chunks():
    schedule = schedule_of(INTERLEAVED, Size(1, 2, 2))
    assert peak_activations(schedule) == (2,)
    assert words(schedule, 0) == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"


@BOTH
def test_the_user_may_choose_the_chunks_and_gets_two_otherwise(family):
    assert (family.chunks, family.default_chunks) == (None, 2)
