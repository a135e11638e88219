"""The step on this machine, by hand: collectives as measured, and a pipeline whose ranks share the cores."""

import pytest

from shoal.core.plan import Plan
from shoal.planner.hardware.machine import Fit
from shoal.planner.pricing.local import RankWork, communication, predict_step
from shoal.schedules.catalogue import make_schedule
from support.planner.machines import build


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
