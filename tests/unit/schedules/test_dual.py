"""DualPipe and DualPipeV are legal in every size they take, and keep to the bubble and activations of their source."""

from fractions import Fraction
from functools import cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.schedules.draw import short
from shoal.schedules.families.bidirectional import DUALPIPE, DUALPIPEV
from shoal.schedules.families.family import Family, Size
from shoal.schedules.player import peak_activations
from shoal.schedules.pricing import Costs, price
from shoal.schedules.rules import check
from shoal.schedules.schedule import Grid, Kind, Schedule
from support.processes.instruction_count import instructions
from support.schedules.sizes import is_edge

BOTH = pytest.mark.parametrize("family", [DUALPIPE, DUALPIPEV], ids=lambda family: family.name)
SIZES = {
    DUALPIPE.name: [(ranks, microbatches) for ranks in (2, 4, 6, 8) for microbatches in range(2, 33, 2)],
    DUALPIPEV.name: [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 33)],
}
ONES = {"no gain": Costs(overlapped=3), "pair of 2.5": Costs(overlapped=2.5), "pair of 2": Costs(overlapped=2)}
"""Forward, input and weight take 1; a pair takes their sum, or less."""


@cache
def dual(family: Family, ranks: int, microbatches: int) -> Schedule:
    size = Size(ranks, microbatches, family.chunks or 1)
    assert not list(family.problems(size))
    return Schedule(
        name=family.name,
        grid=Grid(family.fold, ranks, size.stages, microbatches),
        rows=family.rows(size),
        activation_bound=tuple(family.activations(size, rank) for rank in range(ranks)),
    )


def enough(family: Family) -> list[tuple[int, int]]:
    """Sizes with as many microbatches as the source asks for: just enough, one more, and many."""
    found = SIZES[family.name]
    return [size for size in found if size[1] - 2 * size[0] in (0, 1, 2) or (size[1] == 32 and size[0] < 8)]


def idle(schedule: Schedule, costs: Costs) -> list[float]:
    timeline = price(schedule, costs)
    return [timeline.makespan - timeline.busy(rank) for rank in range(schedule.grid.num_ranks)]


def table(schedule: Schedule, costs: Costs) -> float:
    """The bubble of the source: (S/2-1)(F&B + B - 3W)."""
    backward = costs.input + costs.weight
    pair = costs.forward + backward if costs.overlapped is None else costs.overlapped
    return (schedule.grid.num_stages // 2 - 1) * (pair + backward - 3 * costs.weight)


@BOTH
def test_sizes_are_legal_also_with_fewer_microbatches_than_the_source_takes(family: Family) -> None:
    for ranks, microbatches in filter(lambda pair: is_edge(*pair), SIZES[family.name]):
        check(dual(family, ranks, microbatches))


@BOTH
@pytest.mark.soak
def test_every_other_size_is_legal_too(family: Family) -> None:
    for ranks, microbatches in SIZES[family.name]:
        check(dual(family, ranks, microbatches))


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 32))
def test_two_directions_refuse_odd_numbers_and_the_vee_takes_them(ranks: int, microbatches: int) -> None:
    assert len(list(DUALPIPE.problems(Size(ranks, microbatches, 1)))) == ranks % 2 + microbatches % 2
    assert not list(DUALPIPEV.problems(Size(ranks, microbatches, 2)))


def test_a_refusal_gives_the_number_and_the_next_that_works() -> None:
    ranks, microbatches = DUALPIPE.problems(Size(3, 7, 1))
    assert "3 is odd; set pp to 4" in ranks
    assert "7 is odd; set microbatches to 8" in microbatches


@BOTH
@pytest.mark.parametrize("costs", ONES.values(), ids=ONES)
def test_the_longest_wait_is_exactly_the_tables_when_all_parts_take_one(family: Family, costs: Costs) -> None:
    for ranks, microbatches in enough(family):
        schedule = dual(family, ranks, microbatches)
        assert max(idle(schedule, costs)) == table(schedule, costs), (ranks, microbatches)


@BOTH
@given(data=st.data())
def test_no_rank_waits_longer_than_the_table_says_when_no_part_is_longer_than_the_input_part(
    family: Family, data: st.DataObject
) -> None:
    ranks, microbatches = data.draw(st.sampled_from(enough(family)), label="ranks, microbatches")
    long = data.draw(st.integers(1, 16), label="input")
    forward, weight = (data.draw(st.integers(0, long), label=label) for label in ("forward", "weight"))
    pair = data.draw(st.integers(max(forward, long + weight), forward + long + weight), label="overlapped")
    costs = Costs(forward=forward, input=long, weight=weight, overlapped=pair)
    schedule = dual(family, ranks, microbatches)
    assert max(idle(schedule, costs)) <= table(schedule, costs)


@BOTH
@given(data=st.data())
def test_a_forward_longer_than_the_input_part_costs_the_innermost_rank_exactly_the_difference(
    family: Family, data: st.DataObject
) -> None:
    """The table takes F for I: where F >= I >= W, I gives way to F in its formula."""
    ranks, microbatches = data.draw(st.sampled_from(enough(family)), label="ranks, microbatches")
    weight, part, forward = sorted(data.draw(st.tuples(*[st.integers(0, 16)] * 3), label="weight, input, forward"))
    pair = data.draw(st.integers(max(forward, part + weight), forward + part + weight), label="overlapped")
    costs = Costs(forward=forward, input=part, weight=weight, overlapped=pair)
    schedule = dual(family, ranks, microbatches)
    difference = (schedule.grid.num_stages // 2 - 1) * (forward - part)
    assert max(idle(schedule, costs)) == table(schedule, costs) + difference


@BOTH
def test_activations_are_one_more_than_the_stages_on_every_rank(family: Family) -> None:
    for ranks, microbatches in enough(family):
        schedule = dual(family, ranks, microbatches)
        assert peak_activations(schedule) == (schedule.grid.num_stages + 1,) * ranks


@BOTH
def test_few_microbatches_are_not_slower_than_many(family: Family) -> None:
    for ranks in (2, 4, 6):
        spans = [price(dual(family, *size)).makespan for size in SIZES[family.name] if size[0] == ranks]
        assert spans == sorted(spans)


def test_few_microbatches_take_no_longer_than_they_did() -> None:
    """No source has figures for these; leaving microbatches out of the schedule for eight took 33, 42, 46 and 50."""
    assert [price(dual(DUALPIPEV, 4, microbatches)).makespan for microbatches in (4, 5, 6, 7, 8)] == [
        30,
        38,
        42,
        48,
        54,
    ]


@BOTH
def test_every_pair_is_a_forward_and_a_whole_backward_of_different_stages(family: Family) -> None:
    for ranks, microbatches in enough(family):
        pairs = [cell for row in dual(family, ranks, microbatches).rows for cell in row if len(cell) == 2]
        assert pairs
        for forward, backward in pairs:
            assert (forward.kind, backward.kind) == (Kind.FORWARD, Kind.BACKWARD)
            assert forward.stage != backward.stage


@BOTH
def test_each_rank_splits_a_fixed_number_of_backwards_however_many_microbatches_there_are(family: Family) -> None:
    """In DualPipe's own figure, 8 ranks and 20 microbatches, ranks 0 to 3 split 7, 6, 5 and 4."""
    for ranks, microbatches in enough(family):
        schedule = dual(family, ranks, microbatches)
        depth = schedule.grid.num_stages // 2
        split = [sum(action.kind is Kind.INPUT for action in schedule.actions(rank)) for rank in range(depth)]
        assert split == [2 * depth - 1 - rank for rank in range(depth)]


def test_four_ranks_and_eight_microbatches_go_through_the_eight_phases_of_the_source() -> None:
    outer, inner = (" ".join(map(short, row)) for row in dual(DUALPIPE, 4, 8).rows[:2])
    assert outer == "0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3&3B5 3F6&0B0 3B6 3F7&0B1 3B7 0I2 0W2 0I3 0W3"
    assert inner == "1F0 2F4 1F1 2F5 1F2 2B4 2F6&1B0 1F3&2B5 2F7&1B1 2B6 1B2 2I7 1I3 2W7 1W3"


def test_dualpipev_is_one_half_of_dualpipe() -> None:
    for depth, each in [(1, 2), (2, 5), (3, 6), (4, 10)]:
        cross, vee = dual(DUALPIPE, 2 * depth, 2 * each), dual(DUALPIPEV, depth, each)
        for rank in range(depth):
            there = [[(a.kind, a.stage, a.microbatch % each) for a in cell] for cell in cross.rows[rank]]
            assert there == [[(a.kind, a.stage, a.microbatch) for a in cell] for cell in vee.rows[rank]]


def test_overlap_shortens_the_step_by_what_the_pairs_save() -> None:
    schedule = dual(DUALPIPE, 8, 20)
    plain, overlapped = (price(schedule, costs).makespan for costs in (Costs(), Costs(overlapped=2)))
    share = Fraction(int(overlapped), int(plain))
    assert Fraction(2, 3) < share < Fraction(4, 5)


@BOTH
def test_a_longer_schedule_takes_work_in_proportion(family: Family) -> None:
    short, long = (instructions(partial(family.rows, Size(8, count, family.chunks or 1))) for count in (32, 128))
    assert long < 4 * short
