"""What programs read of a simulation: parts that add up."""

import itertools

import numpy as np
import pytest

from shoal.core.plan import Plan
from shoal.planner.pricing.cost import StageTimes, StepParts
from shoal.planner.simulation.cells import RankBytes, StepBytes
from shoal.planner.simulation.conditions import Conditions, Slow
from shoal.planner.simulation.goodput import Failures, simulate_goodput
from shoal.planner.simulation.local_sgd import LocalUpdates, pace_of
from shoal.planner.simulation.report import describe_goodput, describe_sites, describe_step, report_places
from shoal.planner.simulation.result import SimulatedStep
from shoal.planner.simulation.step import schedule_for, simulate_step


def step(name: str, slow: tuple[Slow, ...] = ()) -> SimulatedStep:
    plan = Plan(pp=4, dp=2, schedule=name)
    stages = schedule_for(plan, 8).grid.num_stages
    parts = StepParts(
        stages=(StageTimes(forward=1.0, input=1.25, weight=0.75),) * stages, microbatches=8, transfer=0.1, fixed=0.5
    )
    needed = StepBytes(places=(RankBytes(weights=10.0, other=1.0),) * 4, activations=(2.0,) * stages)
    return simulate_step(parts, plan=plan, conditions=Conditions(slow=slow), needed=needed)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera", "zb-h1", "pipedream"])
def test_busy_and_idle_make_the_bubble(name):
    simulated = step(name)
    places = report_places(simulated)
    busy, idle = sum(place.busy_seconds for place in places), sum(place.idle_seconds for place in places)
    assert idle / (busy + idle) == pytest.approx(simulated.bubble, abs=1e-9)
    assert [place.num_ranks for place in places] == [2] * 4
    assert sorted({stage for place in places for stage in place.stages}) == list(range(len(simulated.parts.stages)))


def test_means_make_the_bubble_where_replicas_differ():
    """The table of places said 18% idle beside a bubble of 36%: it had the slowest replica's times, the bubble everybody's."""
    simulated = step("1f1b", (Slow(index=0, factor=2.0), Slow(index=3, factor=3.0)))
    places = report_places(simulated)
    idle = sum(place.mean_idle_seconds for place in places)
    assert idle / (4 * simulated.makespan) == pytest.approx(simulated.bubble)
    assert places[0].mean_busy_seconds < places[0].busy_seconds
    assert sum(place.idle_seconds for place in places) < idle


def test_memory_adds_up_to_the_peak():
    for place in report_places(step("1f1b")):
        parts = dict(place.memory)
        assert parts.pop("peak") == sum(parts.values()) and parts["activations"] == 2.0 * (4 - place.place)


def test_a_step_as_values():
    simulated = step("1f1b", (Slow(index=0, factor=2.0),))
    found = describe_step(simulated, np.array([2.0, 4.0]), tokens=30.0)
    assert found["step_seconds"] == 3.0 and found["tokens_per_second"] == 10.0 and found["steps"]["max"] == 4.0
    path = found["critical_path"]
    assert path[0]["start"] == 0.0 and path[-1]["end"] == pytest.approx(simulated.step_seconds)
    assert all(one["end"] == pytest.approx(two["start"]) for one, two in itertools.pairwise(path))
    assert [group["replicas"] for group in found["replicas"]] == [1, 1]
    assert found["replicas"][0]["pipeline_seconds"] > found["replicas"][1]["pipeline_seconds"]


def test_goodput_and_sites_as_values():
    failures = Failures(device_mtbf=8e4, num_devices=8, restart=60.0, checkpoint=5.0)
    run = simulate_goodput(failures, step_seconds=2.0, interval_steps=100, num_steps=50_000)
    found = describe_goodput(failures, run, step_seconds=2.0)
    assert found["interval_seconds"] == 200.0 and found["mtbf_seconds"] == 1e4
    assert found["goodput"] == run.useful_seconds / run.wall_seconds
    updates = LocalUpdates(period=20, num_sites=2, num_bytes=1e6, bandwidth=1e6, latency=0.5)
    sites = describe_sites(updates, pace_of(1.0, updates), step_seconds=1.0, tokens=7.0)
    assert sites["sync_seconds"] == 2.0 and sites["steps_per_second"] == 20 / 22
    assert sites["tokens_per_second"] == 7.0 * 20 / 22 and sites["period"] == 20
    assert [pace["period"] for pace in sites["by_period"]] == [1, 10, 20, 100]
