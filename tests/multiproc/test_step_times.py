"""What events say of time: who is busy and who waits for whom, where a step goes, what every rank did from moment to moment."""

import json
import socket
import statistics
import time

import pytest

from shoal.comm.trafficcounter import traffic_rows
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.engine.resolve import resolve_plan, schedule_of
from shoal.telemetry.config import TelemetryConfig
from shoal.telemetry.eventlog import decode_events
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.tuning.rehearsal import build_subject
from support.training.rehearsals import rehearse_ranks

SLOW_SECONDS = 0.1
RECIPE = {
    "model": {"name": "gpt", "layers": 4, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 17},
    "train": {"steps": 6, "global_batch": 4},
    "telemetry": {"memory_every": 1, "spans_every": 3, "tensorboard": False},
    "checkpoint": {"every": 0},
}


def train(world, plan, folder, slow=None):
    recipe = Recipe.model_validate(RECIPE)
    model, loss, data = build_parts(recipe)
    chosen = {"plan": Plan.parse(plan), "run_dir": folder, "world": world, "telemetry": recipe.telemetry}
    with Trainer(model, data, loss=loss, train=recipe.train, optim=recipe.optim, **chosen) as trainer:
        if world.rank == slow:
            trainer.model.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
        trainer.train()


def events_of(folder, rank, kind):
    lines = RunDir(folder).events(rank).read_bytes().splitlines()
    return [event for event in decode_events(lines) if event["kind"] == kind]


def busy(event):
    return event["seconds"] - event["data_seconds"] - sum(event["wait_seconds"].values())


@pytest.mark.parametrize(
    ("plan", "axis"), [("dp=2", "replicas"), ("dp=2 zero=3", "dp"), ("tp=2", "tp"), ("pp=2 microbatches=2", "pp")]
)
def test_a_rank_that_is_slow_is_busy_and_the_others_wait_for_it(tmp_path, plan, axis):
    run_on_ranks(train, 2, plan, str(tmp_path), 1)
    waiting, slow = (events_of(tmp_path, rank, "step")[2:] for rank in range(2))
    lost = SLOW_SECONDS * (2 if "pp" in plan else 1)
    steps = [step["seconds"] for step in waiting]
    assert statistics.median(steps) > lost, "all steps are as long as the slow rank's"
    assert statistics.median(steps) == pytest.approx(statistics.median(step["seconds"] for step in slow), rel=0.3)
    assert statistics.median(busy(step) for step in slow) > lost
    assert statistics.median(busy(step) for step in waiting) < lost / 2
    # Of two stages the second also waits for the first; what it is slow by, the first waits.
    assert statistics.median(step["wait_seconds"].get(axis, 0.0) for step in waiting) > lost / 2
    assert max(waiting[0]["wait_seconds"], key=waiting[0]["wait_seconds"].get) == axis


@pytest.mark.parametrize(
    "plan", ["dp=2 zero=2", "cp=2", "pp=2 microbatches=4 schedule=zb-h1", "pp=2 schedule=pipedream"]
)
def test_phases_are_the_whole_step(tmp_path, plan):
    run_on_ranks(train, 2, plan, str(tmp_path))
    for rank in range(2):
        for step in events_of(tmp_path, rank, "step"):
            assert sum(step["phases"].values()) == pytest.approx(step["seconds"], abs=2e-5)
            assert step["phases"]["data"] == pytest.approx(step["data_seconds"], abs=2e-6)
            assert {"forward", "backward", "optimizer"} <= set(step["phases"])
            assert 0 < sum(step["wait_seconds"].values()) < step["seconds"]


@pytest.mark.parametrize(
    "plan", ["pp=2 microbatches=4", "pp=2 microbatches=4 schedule=zb-h1", "pp=2 microbatches=4 schedule=interleaved"]
)
def test_spans_of_a_pipeline_are_the_cells_of_its_schedule_in_order(tmp_path, plan):
    run_on_ranks(train, 2, plan, str(tmp_path))
    schedule = schedule_of(resolve_plan(Recipe.model_validate(RECIPE).train, Plan.parse(plan)).plan)
    for rank in range(2):
        steps = {step["step"]: step for step in events_of(tmp_path, rank, "step")}
        found = events_of(tmp_path, rank, "spans")
        assert [event["step"] for event in found] == [2, 3, 6], "the second, and every third"
        for event in found:
            rows, seconds = event["spans"], steps[event["step"]]["seconds"]
            cells = [row for row in rows if row[0] == "cell"]
            assert [name for _, name, *_ in cells] == [str(action) for action in schedule.actions(rank)]
            ends = [start + length for _, _, start, length, _ in cells]
            assert all(end <= cell[2] + 2e-6 for end, cell in zip(ends, cells[1:], strict=False)), "one after another"
            assert all(row[2] >= 0 and row[2] + row[3] <= seconds + 2e-5 for row in rows)
            waits = sum(
                length for kind, name, _, length, _ in rows if kind == "comm" and name in ("pp receive", "pp send")
            )
            other = sum(length for kind, name, _, length, _ in rows if name == "pp all_reduce")
            measured = steps[event["step"]]["wait_seconds"]["pp"]
            assert waits - 1e-3 <= measured <= waits + other + 1e-3
            begin = event["begin"]
            assert begin + seconds == pytest.approx(steps[event["step"]]["t"], abs=0.2), "by the wall clock"


def test_spans_of_several_steps_at_once_have_the_cells_of_all_of_them(tmp_path):
    run_on_ranks(train, 2, "pp=2 microbatches=2 schedule=pipedream-2bw", str(tmp_path))
    for event in events_of(tmp_path, 0, "spans"):
        assert event["num_steps"] >= 1
        assert sum(row[0] == "cell" for row in event["spans"]) == 2 * 2 * event["num_steps"]


def test_spans_show_gathers_and_reductions_of_zero_and_lie_in_the_phases(tmp_path):
    run_on_ranks(train, 2, "dp=2 zero=3", str(tmp_path))
    rows = events_of(tmp_path, 0, "spans")[0]["spans"]
    assert {"dp all_gather", "dp reduce_scatter"} <= {name for kind, name, *_ in rows if kind == "comm"}
    sizes = {name: sum(row[4] for row in rows if row[1] == name) for name in ("dp all_gather", "dp reduce_scatter")}
    before, after = (events_of(tmp_path, 0, "axis_traffic")[place]["rows"] for place in (0, 1))
    assert sizes == {name: after[name][1] - before[name][1] for name in sizes}
    phases = [(start, start + length) for kind, _, start, length, _ in rows if kind in ("phase", "data")]
    for kind, name, start, length, _ in rows:
        if kind == "comm":
            assert any(begin - 2e-6 <= start and start + length <= end + 1e-3 for begin, end in phases), name


@pytest.mark.parametrize("plan", ["dp=2 zero=2 microbatches=2", "tp=2 sp=true", "pp=2 microbatches=2"])
def test_traffic_of_a_step_is_what_was_forecast_for_it(tmp_path, plan):
    run_on_ranks(train, 2, plan, str(tmp_path))
    subject = build_subject(Recipe.model_validate(RECIPE))
    expected = [
        traffic_rows(rank.traffic)
        for rank in rehearse_ranks(subject, Plan.parse(f"dp=1 {plan}" if "dp" not in plan else plan))
    ]
    for rank in range(2):
        found = events_of(tmp_path, rank, "axis_traffic")
        third, fourth = found[2]["rows"], found[3]["rows"]
        moved = {
            name: [a - b for a, b in zip(fourth[name], third.get(name, [0, 0, 0]), strict=True)] for name in fourth
        }
        assert {name: row[:2] for name, row in moved.items() if row[0]} == expected[rank]
        assert all(0 < row[2] < 5 for row in moved.values() if row[0]), "seconds of the rank in each"


def test_every_rank_says_where_it_is(tmp_path):
    run_on_ranks(train, 4, "dp=2 pp=2 microbatches=2", str(tmp_path), deadline_seconds=90)
    found = [events_of(tmp_path, rank, "placed") for rank in range(4)]
    assert [len(placed) for placed in found] == [1, 1, 1, 1]
    assert [placed[0]["coordinates"] for placed in found] == [
        {"pp": pipe, "dp": data} for pipe in range(2) for data in range(2)
    ]
    assert {placed[0]["host"] for placed in found} == {socket.gethostname()}
    assert len({placed[0]["pid"] for placed in found}) == 4


def test_nothing_of_it_is_recorded_where_nobody_wants_it(tmp_path):
    assert TelemetryConfig(spans_every=0).spans_every == 0
    run_on_ranks(without_spans, 2, str(tmp_path))
    kinds = {json.loads(line)["kind"] for line in RunDir(tmp_path).events(0).read_bytes().splitlines()}
    assert "spans" not in kinds and "step" in kinds


def without_spans(world, folder):
    recipe = Recipe.model_validate({**RECIPE, "telemetry": {"spans_every": 0, "tensorboard": False}})
    model, loss, data = build_parts(recipe)
    chosen = {"plan": Plan.parse("dp=2"), "run_dir": folder, "world": world, "telemetry": recipe.telemetry}
    with Trainer(model, data, loss=loss, train=recipe.train, **chosen) as trainer:
        trainer.train()
