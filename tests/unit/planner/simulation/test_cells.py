"""Memory in the course of a step: the schedule's own count of activations, in bytes and in time."""

import itertools

import pytest

from shoal.core.plan import Plan
from shoal.planner.simulation.cells import RankBytes, StepBytes, memory_timeline, peak_bytes
from shoal.planner.simulation.step import schedule_for
from shoal.schedules.catalogue import FAMILIES
from shoal.schedules.player import peak_activations
from shoal.schedules.pricing import price


@pytest.mark.parametrize("name", FAMILIES)
def test_the_peak_is_what_the_schedule_says_it_holds(name):
    schedule = schedule_for(Plan(pp=4, dp=1, schedule=name), 8)
    held = RankBytes(weights=100.0, gradients=50.0, optimizer=200.0, other=7.0)
    needed = StepBytes(places=(held,) * 4, activations=(3.0,) * schedule.grid.num_stages)
    for place, count in enumerate(peak_activations(schedule)):
        # Two that overlap are one cell: the forward's activations come before the backward's go.
        most = 357.0 + 3.0 * count
        assert peak_bytes(schedule, place, needed) == most


def test_bytes_go_up_at_a_forward_and_down_after_the_last_use():
    schedule = schedule_for(Plan(pp=2, dp=1), 2)
    needed = StepBytes(places=(RankBytes(weights=10.0), RankBytes(weights=20.0)), activations=(1.0, 5.0))
    timeline = price(schedule)
    found = memory_timeline(schedule, 1, timeline.spans[1], needed)
    assert found == ((0.0, 20.0), (1.0, 25.0), (4.0, 20.0), (4.0, 25.0), (7.0, 20.0))
    first = memory_timeline(schedule, 0, timeline.spans[0], needed)
    assert max(held for _, held in first) == 12.0 and first[-1] == (9.0, 10.0)


def test_a_split_backward_keeps_activations_until_its_weights_half():
    schedule = schedule_for(Plan(pp=2, dp=1, schedule="zb-h1"), 4)
    needed = StepBytes(places=(RankBytes(), RankBytes()), activations=(1.0, 1.0))
    spans = price(schedule).spans[0]
    ends = [span[1] for cell, span in zip(schedule.rows[0], spans, strict=True) if cell[0].kind == "W"]
    timeline = memory_timeline(schedule, 0, spans, needed)
    downs = [now[0] for before, now in itertools.pairwise(timeline) if now[1] < before[1]]
    assert downs == ends and len(ends) == 4
