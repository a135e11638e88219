"""Where the time of a worker's work units goes: what is told, what is not, and what telling it costs."""

import time

import pytest

from shoal.serverrun.worker.worktimes import WorkTimes
from shoal.telemetry.stepclock import StepClock
from support.processes.instruction_count import instructions

SECONDS = 0.01


class Log:
    def __init__(self):
        self.events = []

    def write(self, event):
        self.events.append(event)

    def close(self):
        pass


def do_unit(times, clock, step, *, is_whole=True):
    with times.taking():
        time.sleep(SECONDS)
    times.begin(step)
    with times.pulling():
        time.sleep(SECONDS)
    with times.computing():
        with clock.loading():
            time.sleep(SECONDS)
        clock.enter("forward", step)
    if is_whole:
        times.computed(3)
    with times.pushing():
        time.sleep(SECONDS)


@pytest.fixture
def told():
    clock, log = StepClock(None, spans_every=4), Log()
    return WorkTimes(clock, lambda: log), clock, log


def test_from_a_work_unit_to_the_next_everything_has_its_place(told):
    times, clock, log = told
    for step in (1, 2, 7):
        do_unit(times, clock, step)
    times.end()
    work = [event for event in log.events if event.kind == "work"]
    assert [(one.step, one.samples) for one in work] == [(1, 3), (2, 3), (7, 3)]
    for one in work[:2]:
        # The wait for the next work unit is this one's; that for the first is nobody's.
        assert set(one.phases) == {"other", "pull", "compute", "data", "forward", "push", "take"}
        assert sum(one.phases.values()) == pytest.approx(one.seconds, abs=1e-5)
        assert one.wait_seconds == pytest.approx(
            {"workers": one.phases["take"], "servers": one.phases["pull"] + one.phases["push"]}, abs=2e-6
        )
        assert one.data_seconds >= SECONDS and one.wait_seconds["servers"] >= 2 * SECONDS
    assert "take" not in work[2].phases
    assert [event.step for event in log.events if event.kind == "spans"] == [2], "the second step, and multiples of 4"


def test_a_work_unit_that_was_not_computed_is_not_told_of(told):
    times, clock, log = told
    do_unit(times, clock, 1, is_whole=False)
    do_unit(times, clock, 1)
    times.end()
    times.end()
    assert [event.kind for event in log.events] == ["work"]


def test_a_work_unit_costs_a_bounded_number_of_instructions(told):
    """A step may have 0.5 ms more (``benchmarks/overhead``); instructions are as many on a busy machine."""
    times, clock, _ = told

    def unit():
        for inside in (times.taking(), times.pulling(), times.computing(), times.pushing()):
            with inside:
                pass
        times.begin(3)
        with clock.loading():
            pass
        times.computed(1)

    unit()
    assert instructions(unit) < 2500
