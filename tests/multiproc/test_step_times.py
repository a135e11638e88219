"""What events say of time: who is busy and who waits for whom, where a step goes, what every rank did from moment to moment."""

import json
import socket
import statistics
import time

import pytest
import torch

from shoal.checkpoint.config import CheckpointConfig
from shoal.comm.trafficcounter import traffic_rows
from shoal.comm.world import World
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.engine.resolve import resolve_plan, schedule_of
from shoal.library.run import Run
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


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """The folder of a run of a plan; a run is made once for all tests that look at it."""
    made = {}

    def run(plan):
        if plan not in made:
            made[plan] = tmp_path_factory.mktemp("run")
            slow = 1 if plan in SLOWED else None
            run_on_ranks(train, 2, plan, str(made[plan]), slow, deadline_seconds=120)
        return made[plan]

    return run


def soak(*values):
    return pytest.param(*values, marks=pytest.mark.soak)


ZERO, STAGES = "dp=2 zero=2", "pp=2 microbatches=4 schedule=zb-h1"
SLOWED = {"dp=2": "replicas", "dp=2 zero=3": "dp", "tp=2": "tp", STAGES: "pp"}
"""Plans whose second rank sleeps in every forward pass, and along which axis the first one waits for it."""


def events_of(folder, rank, kind):
    lines = RunDir(folder).events(rank).read_bytes().splitlines()
    return [event for event in decode_events(lines) if event["kind"] == kind]


def busy(event):
    return event["seconds"] - event["data_seconds"] - sum(event["wait_seconds"].values())


@pytest.mark.parametrize("plan", ["dp=2", STAGES, soak("dp=2 zero=3"), soak("tp=2")])
def test_a_rank_that_is_slow_is_busy_and_the_others_wait_for_it(run_of, plan):
    tmp_path, axis = run_of(plan), SLOWED[plan]
    waiting, slow = (events_of(tmp_path, rank, "step")[2:] for rank in range(2))
    lost = SLOW_SECONDS * (4 if "pp" in plan else 1)
    steps = [step["seconds"] for step in waiting]
    assert statistics.median(steps) > lost, "all steps are as long as the slow rank's"
    assert statistics.median(steps) == pytest.approx(statistics.median(step["seconds"] for step in slow), rel=0.3)
    assert statistics.median(busy(step) for step in slow) > lost
    assert statistics.median(busy(step) for step in waiting) < lost / 2
    # Of two stages the second also waits for the first; what it is slow by, the first waits.
    assert statistics.median(step["wait_seconds"].get(axis, 0.0) for step in waiting) > lost / 2
    assert max(waiting[0]["wait_seconds"], key=waiting[0]["wait_seconds"].get) == axis


@pytest.mark.parametrize("plan", [ZERO, STAGES, soak("cp=2"), soak("pp=2 schedule=pipedream")])
def test_phases_are_the_whole_step(run_of, plan):
    tmp_path = run_of(plan)
    both = [events_of(tmp_path, rank, "step") for rank in range(2)]
    for steps in zip(*both, strict=True):
        for step in steps:
            assert sum(step["phases"].values()) == pytest.approx(step["seconds"], abs=2e-5)
            assert step["phases"]["data"] == pytest.approx(step["data_seconds"], abs=2e-6)
            assert {"forward", "backward", "optimizer"} <= set(step["phases"])
            assert sum(step["wait_seconds"].values()) < step["seconds"]
        # Of two that meet, the one that came last has not waited at all.
        assert sum(sum(step["wait_seconds"].values()) for step in steps) > 0


@pytest.mark.parametrize(
    "plan", [STAGES, soak("pp=2 microbatches=4"), soak("pp=2 microbatches=4 schedule=interleaved")]
)
def test_spans_of_a_pipeline_are_the_cells_of_its_schedule_in_order(run_of, plan):
    tmp_path = run_of(plan)
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


def test_spans_show_gathers_and_reductions_of_zero_and_lie_in_the_phases(run_of):
    tmp_path = run_of(ZERO)
    rows = events_of(tmp_path, 0, "spans")[0]["spans"]
    assert {"dp all_gather", "dp reduce_scatter"} <= {name for kind, name, *_ in rows if kind == "comm"}
    sizes = {name: sum(row[4] for row in rows if row[1] == name) for name in ("dp all_gather", "dp reduce_scatter")}
    before, after = (events_of(tmp_path, 0, "axis_traffic")[place]["rows"] for place in (0, 1))
    assert sizes == {name: after[name][1] - before[name][1] for name in sizes}
    phases = [(start, start + length) for kind, _, start, length, _ in rows if kind in ("phase", "data")]
    for kind, name, start, length, _ in rows:
        if kind == "comm":
            assert any(begin - 2e-6 <= start and start + length <= end + 1e-3 for begin, end in phases), name


@pytest.mark.parametrize("plan", [ZERO, STAGES, soak("dp=2 zero=2 microbatches=2"), soak("tp=2 sp=true")])
def test_traffic_of_a_step_is_what_was_forecast_for_it(run_of, plan):
    tmp_path = run_of(plan)
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


@pytest.mark.parametrize("plan", [ZERO, "dp=2", soak("dp=2 zero=3 microbatches=2")])
def test_what_the_layout_foretells_is_what_is_measured(run_of, plan):
    tmp_path = run_of(plan)
    for rank in range(2):
        (foretold,), held = events_of(tmp_path, rank, "forecast"), events_of(tmp_path, rank, "memory")[3]
        state = foretold["memory_bytes"][str(rank)]
        assert (state["gradients"], state["optimizer"]) == (held["gradient_bytes"], held["optimizer_bytes"])
        assert 0 <= held["weights_bytes"] - state["weights"] < 10_000, "buffers, which nobody trains"
        third, fourth = (event["rows"] for event in events_of(tmp_path, rank, "axis_traffic")[2:4])
        moved = {name: [a - b for a, b in zip(fourth[name], third[name], strict=True)] for name in third}
        expected = foretold["traffic"][str(rank)]
        assert {name: row[1] for name, row in moved.items() if row[0]} == {
            name: row[1] for name, row in expected.items()
        }
        known = {name: calls for name, (calls, _) in expected.items() if calls is not None}
        assert {name: moved[name][0] for name in known} == known
        assert len(known) == (len(expected) if "zero" in plan else len(expected) - 1), "but for DDP's buckets"


def test_the_bubble_of_a_pipeline_is_foretold_by_its_first_rank(run_of):
    tmp_path = run_of(STAGES)
    first, second = (events_of(tmp_path, rank, "forecast")[0] for rank in range(2))
    assert first["bubble"] == pytest.approx(1 / 13), "one unit of every rank's 13: a weight pass fills the other"
    assert second["bubble"] is None and first["traffic"] is None and first["source"] == "layout"


def test_the_forecast_of_a_rehearsed_plan_is_told_whole(tmp_path):
    rank = {
        "state_bytes": {"weights": 5, "gradients": 6, "optimizer": 7},
        "traffic": {"dp all_reduce": [1, 8]},
        "peak_bytes": 20,
    }
    page = {
        "plan": "dp=2",
        "machine": "here",
        "seconds": 0.5,
        "bubble": None,
        "ranks": [rank, {**rank, "peak_bytes": None}],
    }
    RunDir(tmp_path).forecast.write_text(json.dumps(page))
    train(World(Place(), device=torch.device("cpu"), deadline_seconds=5.0), "dp=1", str(tmp_path))
    (told,) = events_of(tmp_path, 0, "forecast")
    assert (told["source"], told["step_seconds"]) == ("rehearsal", 0.5)
    assert told["memory_bytes"] == {"0": {**rank["state_bytes"], "other": 2}, "1": rank["state_bytes"]}
    assert told["traffic"] == {"0": rank["traffic"], "1": rank["traffic"]}


@pytest.mark.soak
def test_every_rank_says_where_it_is(tmp_path):
    run_on_ranks(train, 4, "dp=2 pp=2 microbatches=2", str(tmp_path), deadline_seconds=90)
    found = [events_of(tmp_path, rank, "placed") for rank in range(4)]
    assert [len(placed) for placed in found] == [1, 1, 1, 1]
    assert [placed[0]["coordinates"] for placed in found] == [
        {"pp": pipe, "dp": data} for pipe in range(2) for data in range(2)
    ]
    assert {placed[0]["host"] for placed in found} == {socket.gethostname()}
    assert len({placed[0]["pid"] for placed in found}) == 4


def own_loop(world, folder):
    recipe = Recipe.model_validate(RECIPE)
    model, loss, data = build_parts(recipe)
    telemetry = TelemetryConfig(spans_every=3, tensorboard=False)
    with Run(
        plan="dp=2", run_dir=folder, world=world, telemetry=telemetry, checkpoint=CheckpointConfig(every=0)
    ) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(data, global_batch=4)
        model, optimizer = run.setup(model, optimizer, loss=loss)
        for batch in loader.steps(6):
            run.forward_backward(batch)
            if world.rank == 1:
                time.sleep(SLOW_SECONDS)
            optimizer.step()


def test_a_script_with_its_own_loop_writes_the_same(tmp_path):
    run_on_ranks(own_loop, 2, str(tmp_path))
    for rank in range(2):
        steps = events_of(tmp_path, rank, "step")
        assert len(steps) == 6 and events_of(tmp_path, rank, "placed") and events_of(tmp_path, rank, "axis_traffic")
        for step in steps:
            assert sum(step["phases"].values()) == pytest.approx(step["seconds"], abs=2e-5)
            assert step["data_seconds"] > 0
            assert {"script", "forward", "backward", "data"} <= set(step["phases"])
        # The first rank waits for the other one's sleep in the step after it.
        waits = statistics.median(step["wait_seconds"].get("replicas", 0.0) for step in steps[1:])
        assert waits > SLOW_SECONDS / 2 if rank == 0 else waits < SLOW_SECONDS / 2
        assert [event["step"] for event in events_of(tmp_path, rank, "spans")] == [2, 3, 6]


def test_spans_are_not_recorded_where_nobody_wants_them(tmp_path):
    recipe = Recipe.model_validate(RECIPE)
    model, loss, data = build_parts(recipe)
    with Trainer(
        model, data, loss=loss, train=recipe.train, run_dir=tmp_path, telemetry=TelemetryConfig(spans_every=0)
    ) as trainer:
        trainer.train()
    kinds = {event["kind"] for event in decode_events(RunDir(tmp_path).events(0).read_bytes().splitlines())}
    assert "spans" not in kinds and {"step", "placed", "forecast"} <= kinds
