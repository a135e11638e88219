"""A simulated run directory: the events, in the form and with the fields, that a real run writes."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.core.events import CheckpointSaved, MemoryMeasured, RankFailed, RunEnded, RunStarted, StepDone
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.planner.pricing.cost import StageTimes, StepParts
from shoal.planner.simulation.cells import RankBytes, StepBytes
from shoal.planner.simulation.conditions import Conditions, Slow
from shoal.planner.simulation.goodput import Failures, simulate_goodput
from shoal.planner.simulation.run_directory import RunNumbers, write_run
from shoal.planner.simulation.step import simulate_step

PLAN = Plan(pp=2, dp=2, tp=2)
KINDS = {kind.kind: kind for kind in (CheckpointSaved, MemoryMeasured, RankFailed, RunEnded, RunStarted, StepDone)}
NUMBERS = RunNumbers(
    samples=16, tokens=512, weight_bytes=1000.0, checkpoint_every=2, checkpoint_seconds=0.5, memory_every=100
)


@pytest.fixture
def step():
    held = RankBytes(weights=100.0, gradients=100.0, optimizer=200.0, other=1.0)
    return simulate_step(
        StepParts(stages=(StageTimes(forward=1.0, input=1.0, weight=1.0),) * 2, microbatches=4),
        plan=PLAN,
        conditions=Conditions(slow=(Slow(index=3, factor=2.0),)),
        needed=StepBytes(places=(held, held), activations=(10.0, 20.0)),
    )


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_those_of_a_run(tmp_path, step):
    assert write_run(tmp_path, step, np.array([3.0, 4.0, 5.0]), numbers=NUMBERS) == 4
    assert sorted(path.name for path in (tmp_path / "events").iterdir()) == [
        "rank-000.jsonl",
        "rank-002.jsonl",
        "rank-004.jsonl",
        "rank-006.jsonl",
    ]
    events = lines_of(RunDir(tmp_path).events(4))
    for event in events:
        fields = {key for key in event if key not in ("t", "rank", "kind")}
        assert fields == set(KINDS[event["kind"]].__annotations__) - {"kind"} and event["rank"] == 4
    kinds = [event["kind"] for event in events]
    assert kinds == [
        "run_started",
        "step",
        "memory",
        "step",
        "checkpoint_saved",
        "step",
        "checkpoint_saved",
        "memory",
        "run_ended",
    ]
    assert [event["t"] for event in events] == [0.0, 3.0, 3.0, 7.0, 7.5, 12.5, 13.0, 13.0, 13.0]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3]
    first = events[1]
    assert math.isnan(float(first["loss"])) and (first["samples"], first["tokens"], first["seconds"]) == (16, 512, 3.0)
    assert events[0] | {"plan": str(PLAN), "world_size": 8, "step": 0, "generation": 0} == events[0]


def test_where_time_goes_is_told_as_in_a_run(tmp_path, step):
    write_run(tmp_path, step, np.full(5, step.step_seconds * 2), numbers=replace(NUMBERS, spans_every=4))
    for rank, is_slow in ((0, False), (2, True)):
        events = lines_of(RunDir(tmp_path).events(rank))
        steps = [event for event in events if event["kind"] == "step"]
        for event in steps:
            assert sum(event["phases"].values()) == pytest.approx(event["seconds"])
            busy = event["seconds"] - sum(event["wait_seconds"].values())
            # Four microbatches, each of a forward pass and two halves of a backward one; twice as slow as played, and once more.
            assert busy == pytest.approx(24.0 * (2 if is_slow else 1), rel=0.01)
        spans = [event for event in events if event["kind"] == "spans"]
        assert [event["step"] for event in spans] == [2, 4]
        cells = [row[1] for row in spans[0]["spans"] if row[0] == "cell"]
        place = 0 if rank < 4 else 1
        assert cells == [str(action) for action in step.order.schedule.actions(place)]
        assert spans[0]["begin"] == pytest.approx(steps[0]["t"] + 0.0)
        assert all(row[2] + row[3] <= steps[1]["seconds"] + 1e-6 for row in spans[0]["spans"])
    told = [event for event in lines_of(RunDir(tmp_path).events(0)) if event["kind"] == "forecast"]
    assert len(told) == 1 and told[0]["step_seconds"] == pytest.approx(step.step_seconds)
    assert told[0]["memory_bytes"]["0"]["weights"] == 100


def test_memory_is_that_of_the_place(tmp_path, step):
    write_run(tmp_path, step, np.array([3.0]), numbers=NUMBERS)
    for rank, activations in ((0, 2 * 10.0), (4, 20.0)):
        measured = next(event for event in lines_of(RunDir(tmp_path).events(rank)) if event["kind"] == "memory")
        assert measured["weights_bytes"] == 100 and measured["optimizer_bytes"] == 200
        assert measured["peak_rss_bytes"] == 401 + activations and measured["other_bytes"] == 1 + activations


@pytest.mark.parametrize(
    ("num_steps", "every", "read_at"),
    [(1, 100, [1, 1]), (3, 100, [1, 3]), (5, 2, [1, 2, 4, 5]), (4, 2, [1, 2, 4, 4]), (5, 0, [5])],
)
def test_memory_is_read_as_often_as_in_a_run(tmp_path, step, num_steps, every, read_at):
    numbers = replace(NUMBERS, memory_every=every)
    write_run(tmp_path, step, np.full(num_steps, 3.0), numbers=numbers)
    events = lines_of(RunDir(tmp_path).events(0))
    assert [event["step"] for event in events if event["kind"] == "memory"] == read_at
    assert [event["kind"] for event in events][-2:] == ["memory", "run_ended"]


def test_plan_and_summary_have_the_keys_of_a_run(tmp_path, step):
    write_run(tmp_path, step, np.array([3.0, 5.0]), numbers=NUMBERS)
    summary = json.loads(RunDir(tmp_path).summary.read_text())
    assert summary["simulated"] is True and summary["status"] == "completed" and summary["steps"] == 2
    assert summary["wall_s"] == 8.5 and summary["tokens_per_s"] == 2 * 512 / 8.5
    assert summary["peak_rss_bytes"] == [421] * 4 + [421] * 4
    plan = json.loads(RunDir(tmp_path).plan.read_text())
    assert plan["plan"] == str(PLAN) and plan["tp"] == 2


def test_every_rank_on_request(tmp_path, step):
    assert write_run(tmp_path, step, np.array([3.0]), numbers=NUMBERS, expand=True) == 8
    assert len(list((tmp_path / "events").iterdir())) == 8


def test_a_run_with_failures_has_a_generation_for_each_and_repeats_lost_steps(tmp_path, step):
    failures = Failures(device_mtbf=400.0, num_devices=8, restart=7.0, checkpoint=0.5)
    goodput = simulate_goodput(failures, step_seconds=2.0, interval_steps=4, num_steps=60, seed=1)
    assert goodput.num_failures > 1
    write_run(tmp_path, step, np.full(60, 2.0), numbers=NUMBERS, goodput=goodput)
    events = lines_of(RunDir(tmp_path).events(0))
    times = [event["t"] for event in events]
    assert times == sorted(times)
    started = [event for event in events if event["kind"] == "run_started"]
    assert [event["generation"] for event in started] == list(range(len(goodput.attempts)))
    assert [event["step"] for event in started] == [attempt.first_step for attempt in goodput.attempts]
    saved = [event["step"] for event in events if event["kind"] == "checkpoint_saved"]
    assert saved == list(range(4, 61, 4))
    # What a failure threw away is done again.
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert len(steps) > 60 and set(steps) == set(range(1, 61))
    told = lines_of(RunDir(tmp_path).supervisor_events)
    assert [event["kind"] for event in told] == ["rank_failed"] * (len(goodput.attempts) - 1)
    assert all(event["rank"] is None and 0 <= event["culprit_rank"] < 8 for event in told)
    for failed, attempt in zip(told, goodput.attempts, strict=False):
        assert failed["t"] == pytest.approx(attempt.end, abs=1e-6)
    assert events[-1]["t"] == pytest.approx(goodput.wall_seconds, abs=1e-6)


def test_a_failure_during_a_save_finds_no_steps_after_it(tmp_path, step):
    """Saves take so long here that most failures fall into one: the rank stands still then."""
    failures = Failures(device_mtbf=800.0, num_devices=8, restart=1.0, checkpoint=30.0)
    goodput = simulate_goodput(failures, step_seconds=2.0, interval_steps=4, num_steps=40, seed=4)
    numbers = RunNumbers(samples=1, tokens=1, checkpoint_seconds=30.0)
    write_run(tmp_path, step, np.full(40, 2.0), numbers=numbers, goodput=goodput)
    highest: dict[int, int] = {}
    generation = -1
    for event in lines_of(RunDir(tmp_path).events(0)):
        generation += event["kind"] == "run_started"
        if event["kind"] == "step":
            highest[generation] = event["step"]
    hit = 0
    for number, attempt in enumerate(goodput.attempts):
        kept = attempt.first_step + attempt.num_steps
        assert highest.get(number, kept) <= min(40, kept + 4)
        hit += attempt.lost > 4 * 2.0
    assert hit > 3


def test_a_folder_with_a_run_is_refused(tmp_path, step):
    write_run(tmp_path, step, np.array([3.0]), numbers=NUMBERS)
    with pytest.raises(RequestError, match="holds a run already"):
        write_run(tmp_path, step, np.array([3.0]), numbers=NUMBERS)


def test_too_many_events_are_refused_before_any_is_written(tmp_path, step):
    with pytest.raises(RequestError, match="at most 5000000 are written"):
        write_run(tmp_path / "run", step, np.ones(1_300_000), numbers=NUMBERS)
    assert not (tmp_path / "run").exists()
