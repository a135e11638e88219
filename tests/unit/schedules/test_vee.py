"""ZBV, V-Half and V-Min: legal in every size, within the activations of the papers, and as short as they promise."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.schedules.families.family import Family, Size
from shoal.schedules.families.one_f_one_b import ONE_F_ONE_B
from shoal.schedules.families.zero_bubble import V_HALF, V_MIN, ZBV, Block, half_block, min_block, repeat, squeeze
from shoal.schedules.player import peak_activations
from shoal.schedules.pricing import Costs, price
from shoal.schedules.rules import check
from shoal.schedules.schedule import Grid, Kind, Schedule, parse_cell
from support.schedules.sizes import EVERY, Pairs, sweep

FAMILIES = pytest.mark.parametrize("family", [ZBV, V_HALF, V_MIN], ids=lambda family: family.name)
FEW_AND_MANY = (1, 2, 3, 4, 5, 8, 15, 32)


@cache
def made(family: Family, ranks: int, microbatches: int) -> Schedule:
    size = Size(ranks, microbatches, family.chunks or 1)
    return Schedule(
        name=family.name,
        grid=Grid(family.fold, ranks, size.stages, microbatches),
        rows=family.rows(size),
        activation_bound=tuple(family.activations(size, rank) for rank in range(ranks)),
    )


def bubble(family: Family, ranks: int, microbatches: int) -> float:
    """What the makespan has beyond one rank's work."""
    return price(made(family, ranks, microbatches)).makespan - 6 * microbatches


@FAMILIES
@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 32))
def test_every_size_is_legal(family: Family, ranks: int, microbatches: int) -> None:
    check(made(family, ranks, microbatches))


@FAMILIES
def test_every_small_size_is_legal(family: Family) -> None:
    for ranks in range(1, 9):
        for microbatches in range(1, ranks + 1):
            check(made(family, ranks, microbatches))


@pytest.mark.parametrize(
    ("family", "bounds"),
    [
        (ZBV, (2, 4, 6, 8, 10, 12, 14, 16)),
        (V_HALF, (2, 4, 4, 6, 6, 8, 8, 10)),
        (V_MIN, (2, 4, 4, 4, 6, 6, 6, 8)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_fullest_rank_holds_what_the_paper_says_for_one_to_eight_ranks(
    family: Family, bounds: tuple[int, ...]
) -> None:
    """Twice P, (P+2)//2 and (P+4)//3, which the authors count in whole stages of two chunks."""
    for ranks, bound in enumerate(bounds, start=1):
        for microbatches in FEW_AND_MANY:
            peak = max(peak_activations(made(family, ranks, microbatches)))
            assert peak <= bound, (ranks, microbatches)
        assert peak == bound, ranks


@FAMILIES
def test_a_rank_promises_to_hold_no_more_than_there_is(family: Family) -> None:
    assert family.activations(Size(8, 1, 2), 0) == 2


@sweep([(ranks, microbatches) for ranks, microbatches in EVERY if microbatches >= 2 * ranks - 1])
def test_no_rank_of_zbv_waits_within_its_span_from_2p_minus_1_microbatches_on(pairs: Pairs) -> None:
    for ranks, microbatches in pairs:
        timeline = price(made(ZBV, ranks, microbatches))
        waits = [timeline.idle_in_own_span(rank) for rank in range(ranks)]
        assert waits == [0] * ranks, (ranks, microbatches)
        assert timeline.makespan == 6 * microbatches + ranks - 1


def test_zbv_with_fewer_microbatches_must_wait() -> None:
    """So that the figure above is where it begins, and not a loose one."""
    for ranks in range(2, 9):
        timeline = price(made(ZBV, ranks, 2 * ranks - 2))
        assert sum(timeline.idle_in_own_span(rank) for rank in range(ranks)) == 1


def test_zbv_is_only_p_minus_1_longer_than_the_work_from_p_microbatches_on() -> None:
    for ranks in range(1, 9):
        for microbatches in range(ranks, 2 * ranks):
            assert bubble(ZBV, ranks, microbatches) == ranks - 1, (ranks, microbatches)


def v_half_bubble(ranks: int, microbatches: int) -> int:
    if ranks == 1:
        return 0
    shorter = 1 if ranks > 2 and ranks % 2 == 0 else 0
    return max(4 * ranks - 3 - 2 * microbatches, 3 * ranks - 4 - shorter)


def v_min_bubble(ranks: int, microbatches: int) -> int:
    return max(0, 4 * ranks - 5)


@pytest.mark.parametrize(
    ("family", "formula"), [(V_HALF, v_half_bubble), (V_MIN, v_min_bubble)], ids=["v-half", "v-min"]
)
def test_the_makespan_is_the_stated_formula(family: Family, formula: Callable[[int, int], int]) -> None:
    sizes = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in FEW_AND_MANY]
    for ranks, microbatches in [*sizes, (15, 24), (16, 24)]:
        assert bubble(family, ranks, microbatches) == formula(ranks, microbatches), (ranks, microbatches)


@pytest.mark.parametrize(("family", "share"), [(V_HALF, 1 / 2), (V_MIN, 2 / 3)], ids=["v-half", "v-min"])
def test_the_bubble_is_within_its_share_of_that_of_1f1b(family: Family, share: float) -> None:
    """The same model: a stage of 1F1B is two of a vee. Memory has its share too, up to a constant."""
    two_in_one = Costs(forward=2.0, input=2.0, weight=2.0)
    for ranks in range(1, 9):
        peer = made(ONE_F_ONE_B, ranks, 32)
        assert bubble(family, ranks, 32) <= share * (price(peer, two_in_one).makespan - 6 * 32), ranks
        saved = {V_HALF.name: 1 / 2, V_MIN.name: 1 / 3}[family.name]
        held = max(peak_activations(made(family, ranks, 32)))
        assert held <= saved * 2 * max(peak_activations(peer)) + 8 / 3, ranks


@pytest.mark.parametrize("block", [half_block, min_block])
def test_blocks_that_start_six_units_apart_never_meet_and_never_run_ahead(block: Callable[[int], Block]) -> None:
    for ranks in range(1, 33):
        cells = block(ranks).starts(ranks)
        taken = {(start % 6, min(stage, 2 * ranks - 1 - stage)) for start, _, stage in cells}
        assert len(taken) == len(cells) == 4 * ranks, ranks
        starts = [start for start, _, _ in cells]
        assert all(before < after for before, after in pairwise(starts)), ranks


def test_zbv_of_two_ranks_and_three_microbatches_is_this() -> None:
    drawn = (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2",
    )
    assert made(ZBV, 2, 3).rows == tuple(tuple(map(parse_cell, row.split())) for row in drawn)


def test_no_rank_waits_while_it_has_a_weights_gradient_to_compute() -> None:
    """A rank that has a W to do is never idle: where there is a gap, every I so far has had its W."""
    for family in (ZBV, V_HALF, V_MIN):
        schedule = made(family, 6, 9)
        timeline = price(schedule)
        for rank, row in enumerate(schedule.rows):
            owed = 0
            for index, (action,) in enumerate(row):
                if index and timeline.spans[rank][index][0] > timeline.spans[rank][index - 1][1]:
                    assert owed == 0, (family.name, rank, index)
                owed += {Kind.INPUT: 1, Kind.WEIGHT: -1}.get(action.kind, 0)


def test_squeezing_into_fewer_activations_than_the_order_holds_is_noticed() -> None:
    size = Size(4, 8, 2)
    with pytest.raises(AssertionError, match="no rank can go on with 3 activations"):
        squeeze(repeat(min_block(4), size), size, 3)


@FAMILIES
def test_eight_ranks_and_two_hundred_microbatches_are_not_beyond_the_figures(family: Family) -> None:
    schedule = made(family, 8, 200)
    check(schedule)
    assert price(schedule).makespan == 6 * 200 + {"zbv": 7, "v-half": 19, "v-min": 27}[family.name]
