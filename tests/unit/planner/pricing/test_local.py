"""The step on shared cores: by hand where that is possible, and equal to the schedule's own price where every rank has a core."""

import pytest

from shoal.core.plan import Plan
from shoal.planner.hardware.machine import Fit
from shoal.planner.pricing.local import RankWork, communication, predict_step
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.player import order_cells, play_on_shared_cores, timeline_of
from shoal.schedules.pricing import Costs, price
from support.planner.machines import build

FAMILIES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "chimera", "dualpipev"]


def play(schedule, costs, *, transfer, speed, waiting=0.0):
    """Length and busy times of a schedule on shared cores."""
    order = order_cells(schedule)
    work = [costs.of(each.cell) for each in order.cells]
    times = play_on_shared_cores(order, work, [waiting] * len(work), transfer=transfer, speed=speed)
    timeline = timeline_of(order, *times)
    return timeline.makespan, [timeline.busy(rank) for rank in range(len(order.rows))]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_with_a_core_for_every_rank_it_is_the_price_of_the_schedule(name, transfer):
    schedule = make_schedule(name, ranks=4, microbatches=8, chunks=None)
    costs = Costs(forward=1.0, input=1.5, weight=0.7, transfer=transfer)
    length, busy = play(schedule, costs, transfer=transfer, speed=lambda active: 1.0)
    timeline = price(schedule, costs)
    assert length == pytest.approx(timeline.makespan)
    assert busy == pytest.approx([timeline.busy(rank) for rank in range(4)])


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 3)])
def test_stages_of_several_ranks_are_played_as_they_are_priced(replicas):
    schedule = make_schedule("1f1b", ranks=4, microbatches=8, replicas=replicas)
    costs = Costs(forward=1.0, input=1.5, weight=0.7, transfer=0.25, stages=tuple(map(float, replicas)))
    length, busy = play(schedule, costs, transfer=0.25, speed=lambda active: 1.0)
    timeline = price(schedule, costs)
    assert length == pytest.approx(timeline.makespan)
    assert busy == pytest.approx([timeline.busy(rank) for rank in range(4)])


@pytest.mark.parametrize("name", FAMILIES)
def test_on_one_core_all_the_work_is_done_one_after_another(name):
    schedule = make_schedule(name, ranks=4, microbatches=8, chunks=None)
    costs = Costs(forward=1.0, input=1.0, weight=1.0)
    length, _ = play(schedule, costs, transfer=0.0, speed=lambda active: 1.0 / active)
    assert length == pytest.approx(sum(costs.of(cell) for row in schedule.rows for cell in row))


def test_waiting_is_not_shared():
    schedule = make_schedule("gpipe", ranks=1, microbatches=2, chunks=None)
    length, _ = play(schedule, Costs(weight=0.0), transfer=0.0, speed=lambda active: 0.5, waiting=0.5)
    assert length == pytest.approx(4 * (2.0 + 0.5))


def test_a_step_without_a_pipeline_by_hand():
    machine = build(fit=Fit(compute=2.0, communication=3.0, fixed_seconds=0.25))
    work = RankWork(seconds=1.0, cells={}, traffic={("replicas", "all_reduce"): (2, 4000)})
    found = predict_step(Plan.parse("dp=2"), None, [work], machine)
    # It was timed with both at once; a call of 2,000 bytes takes 1.5 ms.
    assert found.compute == pytest.approx(1.0 * 2.0)
    assert found.communication == pytest.approx({"replicas": 2 * 1.5e-3 * 3.0})
    assert found.seconds == pytest.approx(2.0 + 9e-3 + 0.25)
    assert found.bubble is None


@pytest.mark.parametrize(("own", "alone"), [(None, 1 / 1.2), (1.2, 1 / 1.2), (1.5, 1 / 1.5), (1.0, 1.0)])
def test_a_rank_of_a_pipeline_is_faster_while_the_other_waits(own, alone):
    schedule = make_schedule("gpipe", ranks=2, microbatches=1, chunks=None)
    works = [RankWork(seconds=2.0, cells=dict.fromkeys(schedule.actions(rank), 1.0), traffic={}) for rank in range(2)]
    found = predict_step(Plan.parse("dp=1 pp=2 microbatches=1"), schedule, works, build(), slow_down=own)
    # One microbatch goes there and back, and nobody ever computes beside the one that has it.
    assert found.seconds == pytest.approx(4 * alone)


def test_channels_are_as_wide_as_their_axis():
    plan = Plan.parse("dp=2 tp=2")
    traffic = {("tp", "all_reduce"): (1, 1000), ("everyone", "all_reduce"): (1, 1000), ("dp", "all_reduce"): (1, 1000)}
    assert communication(traffic, plan, build()) == pytest.approx({"tp": 1.5e-3, "everyone": 5e-3, "dp": 1.5e-3})


def test_a_pipeline_by_hand():
    schedule = make_schedule("gpipe", ranks=2, microbatches=2, chunks=None)
    machine = build(sharing=[])
    works = []
    for rank in range(2):
        cells = dict.fromkeys(schedule.actions(rank), 1.0)
        works.append(RankWork(seconds=sum(cells.values()) + 0.5, cells=cells, traffic={}))
    found = predict_step(Plan.parse("dp=1 pp=2 microbatches=2"), schedule, works, machine)
    # Two forwards and two backwards each, and one cell of waiting at either end; then the update.
    assert found.seconds == pytest.approx(6 + 0.5)
    assert found.bubble == pytest.approx(1 - 4 / 6)
