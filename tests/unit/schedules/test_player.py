"""The player: one column like many, a path without gaps, ranks that never end; and shared cores beside cores of one's own."""

import itertools

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.player import (
    critical_path,
    find_stuck,
    order_cells,
    play,
    play_on_shared_cores,
    timeline_of,
)
from shoal.schedules.pricing import Costs, price
from shoal.schedules.schedule import Fold, Grid, Schedule, parse_cell

FAMILIES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "chimera", "dualpipev"]


def play_shared(schedule, costs, *, transfer, speed, waiting=0.0):
    """Length and busy times of a schedule on shared cores."""
    order = order_cells(schedule)
    work = [costs.of(each.cell) for each in order.cells]
    times = play_on_shared_cores(order, work, [waiting] * len(work), transfer=transfer, speed=speed)
    timeline = timeline_of(order, *times)
    return timeline.makespan, [timeline.busy(rank) for rank in range(len(order.rows))]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_with_a_core_for_every_rank_shared_cores_give_the_price_of_the_schedule(name, transfer):
    schedule = make_schedule(name, ranks=4, microbatches=8, chunks=None)
    costs = Costs(forward=1.0, input=1.5, weight=0.7, transfer=transfer)
    length, busy = play_shared(schedule, costs, transfer=transfer, speed=lambda active: 1.0)
    timeline = price(schedule, costs)
    assert length == pytest.approx(timeline.makespan)
    assert busy == pytest.approx([timeline.busy(rank) for rank in range(4)])


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 3)])
def test_stages_of_several_ranks_are_played_as_they_are_priced(replicas):
    schedule = make_schedule("1f1b", ranks=4, microbatches=8, replicas=replicas)
    costs = Costs(forward=1.0, input=1.5, weight=0.7, transfer=0.25, stages=tuple(map(float, replicas)))
    length, busy = play_shared(schedule, costs, transfer=0.25, speed=lambda active: 1.0)
    timeline = price(schedule, costs)
    assert length == pytest.approx(timeline.makespan)
    assert busy == pytest.approx([timeline.busy(rank) for rank in range(4)])


@pytest.mark.parametrize("name", FAMILIES)
def test_on_one_core_all_the_work_is_done_one_after_another(name):
    schedule = make_schedule(name, ranks=4, microbatches=8, chunks=None)
    costs = Costs(forward=1.0, input=1.0, weight=1.0)
    length, _ = play_shared(schedule, costs, transfer=0.0, speed=lambda active: 1.0 / active)
    assert length == pytest.approx(sum(costs.of(cell) for row in schedule.rows for cell in row))


def test_waiting_is_not_shared():
    schedule = make_schedule("gpipe", ranks=1, microbatches=2, chunks=None)
    length, _ = play_shared(schedule, Costs(weight=0.0), transfer=0.0, speed=lambda active: 0.5, waiting=0.5)
    assert length == pytest.approx(4 * (2.0 + 0.5))


@pytest.mark.parametrize("name", FAMILIES)
def test_columns_are_played_as_each_would_be_alone(name):
    order = order_cells(make_schedule(name, ranks=4, microbatches=8))
    draws = np.random.default_rng(1)
    durations, transfers = draws.random((len(order.cells), 3)), draws.random((4, 3))
    together = play(order, list(durations), list(transfers), begin=np.zeros(3), later=np.maximum)
    for column in range(3):
        alone = play(order, durations[:, column].tolist(), transfers[:, column].tolist(), begin=0.0, later=max)
        for times, own in zip(together, alone, strict=True):
            assert [float(each[column]) for each in times] == own


@pytest.mark.parametrize("name", FAMILIES)
def test_the_critical_path_goes_from_the_first_start_to_the_last_end_without_gaps(name):
    order = order_cells(make_schedule(name, ranks=4, microbatches=8))
    durations, transfers = [1.0 + number % 3 for number in range(len(order.cells))], [0.25, 0.5, 0.75, 1.0]
    starts, ends = play(order, durations, transfers, begin=0.0, later=max)
    path = critical_path(order, starts, ends, transfers, last=ends.index(max(ends)))
    assert starts[path[0]] == 0.0 and ends[path[-1]] == max(ends)
    for one, other in itertools.pairwise(path):
        is_far = order.cells[one].rank != order.cells[other].rank
        assert starts[other] == ends[one] + (transfers[order.cells[one].rank] if is_far else 0.0)


def test_a_rank_that_waits_for_ever_is_found_and_not_played():
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1B1", "1F1"]]
    grid = Grid(Fold.LINE, 2, 2, 2)
    schedule = Schedule(name="mine", grid=grid, rows=tuple(tuple(map(parse_cell, row)) for row in rows))
    assert find_stuck(schedule) == {0: 3, 1: 2}
    with pytest.raises(RequestError, match="schedule mine: rank 0 waits for ever at its cell 3"):
        order_cells(schedule)
