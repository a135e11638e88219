"""Chimera is legal in every even size, ends when the paper says, and holds no more activations than it says."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.schedules.families.bidirectional import CHIMERA
from shoal.schedules.families.family import Size
from shoal.schedules.player import peak_activations
from shoal.schedules.pricing import Costs, price
from shoal.schedules.rules import check
from shoal.schedules.schedule import Grid, Kind, Schedule
from support.processes.instruction_count import instructions

EQUAL = Costs(forward=1, input=0.5, weight=0.5)
"""A forward takes as long as a backward: what the paper's figures are for."""
EVEN_SIZES = [(ranks, microbatches) for ranks in (2, 4, 6, 8) for microbatches in range(2, 33, 2)]

evens = st.integers(1, 4).map(lambda half: 2 * half)
many_evens = st.integers(1, 16).map(lambda half: 2 * half)


def chimera(ranks: int, microbatches: int) -> Schedule:
    size = Size(ranks, microbatches, 1)
    assert not list(CHIMERA.problems(size))
    return Schedule(
        name=CHIMERA.name,
        grid=Grid(CHIMERA.fold, ranks, ranks, microbatches),
        rows=CHIMERA.rows(size),
        activation_bound=tuple(CHIMERA.activations(size, rank) for rank in range(ranks)),
    )


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_every_even_size_is_legal(ranks: int) -> None:
    for microbatches in range(2, 33, 2):
        check(chimera(ranks, microbatches))


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 32))
def test_a_size_is_refused_exactly_when_a_number_is_odd(ranks: int, microbatches: int) -> None:
    refused = list(CHIMERA.problems(Size(ranks, microbatches, 1)))
    assert len(refused) == ranks % 2 + microbatches % 2


def test_a_refusal_gives_the_number_and_the_next_that_works() -> None:
    ranks, microbatches = CHIMERA.problems(Size(3, 5, 1))
    assert "3 is odd; set pp to 4" in ranks
    assert "5 is odd; set microbatches to 6" in microbatches


@given(ranks=evens, microbatches=many_evens)
def test_the_bubble_is_the_papers_from_as_many_microbatches_as_ranks(ranks: int, microbatches: int) -> None:
    """The paper states it for multiples of the ranks; here it holds for what lies between them too."""
    microbatches = max(ranks, microbatches)
    timeline = price(chimera(ranks, microbatches), EQUAL)
    assert timeline.makespan == 2 * microbatches + ranks - 2
    assert timeline.bubble == pytest.approx((ranks - 2) / (2 * microbatches + ranks - 2), abs=1e-12)


@given(ranks=evens, microbatches=many_evens)
def test_few_microbatches_wait_only_for_one_another_at_the_first_stage(ranks: int, microbatches: int) -> None:
    microbatches = min(ranks, microbatches)
    assert price(chimera(ranks, microbatches), EQUAL).makespan == 2 * ranks + microbatches - 2


def test_activations_grow_from_half_the_ranks_and_one_to_all_of_them() -> None:
    for units in (1, 2, 3):
        assert peak_activations(chimera(8, 8 * units)) == (5, 6, 7, 8, 8, 7, 6, 5)


def test_no_rank_holds_more_activations_than_there_are_ranks() -> None:
    for ranks, microbatches in [*EVEN_SIZES, (16, 36), (16, 40), (20, 50)]:
        assert max(peak_activations(chimera(ranks, microbatches))) <= min(ranks, microbatches)


@given(ranks=evens, microbatches=many_evens)
def test_where_no_rest_is_left_the_bound_of_activations_is_reached_on_every_rank(ranks: int, microbatches: int) -> None:
    if microbatches > ranks:
        microbatches = ranks * (microbatches // ranks)
    schedule = chimera(ranks, microbatches)
    assert peak_activations(schedule) == schedule.activation_bound


@given(ranks=evens, microbatches=many_evens)
def test_the_two_directions_mirror_each_other(ranks: int, microbatches: int) -> None:
    rows, each = chimera(ranks, microbatches).rows, microbatches // 2
    for row, opposite in zip(rows, reversed(rows), strict=True):
        other_way = [(action.stage, action.kind, (action.microbatch + each) % microbatches) for (action,) in opposite]
        assert [(action.stage, action.kind, action.microbatch) for (action,) in row] == other_way


def test_the_unit_of_four_ranks_is_that_of_the_papers_figure() -> None:
    rows = [" ".join(str(action) for (action,) in row) for row in chimera(4, 4).rows]
    assert rows[0] == "0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1"
    assert rows[1] == "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1"


def test_backwards_are_whole_and_nothing_overlaps() -> None:
    rows = chimera(6, 14).rows
    assert {len(cell) for row in rows for cell in row} == {1}
    assert {action.kind for row in rows for (action,) in row} == {Kind.FORWARD, Kind.BACKWARD}


def test_a_longer_schedule_takes_work_in_proportion() -> None:
    short, long = (instructions(partial(CHIMERA.rows, Size(8, count, 1))) for count in (32, 128))
    assert long < 5 * short
