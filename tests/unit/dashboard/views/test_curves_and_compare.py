"""Curves as charts take them, and the first step at which runs differ."""

import json

import pytest

from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.compare import compare_answer, first_difference
from shoal.dashboard.views.curves import curve_answer
from support.dashboard.synthetic import make_run, started_line, step_line


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    return Run(make_run(tmp_path_factory.mktemp("runs") / "long", steps=20_000, spike_at=12_345)).look_once()


@pytest.mark.parametrize("axis", ["step", "samples", "tokens", "time"])
@pytest.mark.parametrize("points", [10, 1000])
def test_the_spike_is_in_every_answer(long_run, axis, points):
    answer = curve_answer(long_run, "loss", axis=axis, points=points)
    assert max(answer["max"]) == 1000.0 and not answer["exact"]
    assert len(json.dumps(answer)) < 200_000


def test_zoomed_in_the_numbers_are_those_of_the_events(long_run):
    answer = curve_answer(long_run, "loss", first=12_340, last=12_350)
    lines = (long_run.path / "events" / "rank-000.jsonl").read_text().splitlines()
    said = {event["step"]: event["loss"] for event in map(json.loads, lines) if event["kind"] == "step"}
    assert answer["exact"] and answer["x"] == list(range(12_340, 12_351))
    assert answer["mean"] == answer["min"] == [said[step] for step in range(12_340, 12_351)]


def test_a_curve_that_is_not_there_is_none(long_run):
    assert curve_answer(long_run, "nothing") is None
    assert curve_answer(long_run, "loss", axis="moon") is None
    assert curve_answer(long_run, "loss", rank=7) is None
    assert curve_answer(long_run, "step") is None


def test_ticks_mark_restarts_and_checkpoints(tmp_path):
    path = make_run(tmp_path / "one", steps=10)
    saved = {
        "t": 1.0,
        "rank": 0,
        "kind": "checkpoint_saved",
        "step": 5,
        "path": "x",
        "num_bytes": 1,
        "stall_seconds": 0,
        "write_seconds": 0,
    }
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.write(
            json.dumps(saved)
            + "\n"
            + started_line(0, t=2.0, step=5, generation=1)
            + step_line(6, 0, t=3.0)
            + step_line(7, 0, t=4.0)
        )
    answer = curve_answer(Run(path).look_once(), "loss")
    assert answer["x"] == [1, 2, 3, 4, 5, 6, 7]
    assert [(tick["x"], tick["kind"]) for tick in answer["ticks"]] == [(5, "checkpoint"), (5, "restart")]


def test_the_first_difference_is_found_and_named(tmp_path):
    one = make_run(tmp_path / "one", steps=50)
    for name, change in (("norm", {"grad_norm": 7.0}), ("loss", {"loss": 9.0, "grad_norm": 7.0})):
        other = make_run(tmp_path / name, steps=50)
        events = other / "events" / "rank-000.jsonl"
        lines = events.read_text().splitlines()
        lines[20] = json.dumps({**json.loads(lines[20]), **change})
        lines[40] = json.dumps({**json.loads(lines[40]), "loss": 5.0})
        events.write_text("\n".join(lines) + "\n")
    runs = {name: Run(tmp_path / name).look_once() for name in ("one", "norm", "loss")}
    assert one and first_difference([runs["one"], runs["one"]]) is None
    found = first_difference([runs["one"], runs["norm"]])
    assert (found["step"], found["what"], found["values"][1]) == (20, "gradient norm", 7.0)
    found = first_difference([runs["one"], runs["loss"], runs["one"]])
    assert (found["step"], found["what"], found["values"][1]) == (20, "loss", 9.0)


def test_keys_that_differ_are_listed(tmp_path):
    runs = []
    for name, recipe in (
        ("a", "[optim]\nlr = 1\n[train]\nseed = 1\n"),
        ("b", "[optim]\nlr = 1.0\n[train]\nseed = 1\nsteps = 3\n"),
    ):
        path = make_run(tmp_path / name, steps=3)
        (path / "recipe.toml").write_text(recipe)
        runs.append(Run(path).look_once())
    answer = compare_answer(runs, 0.0)
    assert answer["recipe"] == [{"key": "optim.lr", "values": [1, 1.0]}, {"key": "train.steps", "values": [None, 3]}]
    assert answer["plan"] == [] and answer["common_steps"] == 3 and len(answer["summary"]) == 2


def test_a_norm_that_nobody_has_is_no_curve(tmp_path):
    path = make_run(tmp_path / "one", steps=0, status=None)
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.writelines(step_line(step, 0, t=float(step), grad_norm=None) for step in range(1, 4))
    run = Run(path).look_once()
    assert "gradient_norm" not in [curve.name for curve in run.curve_names()] and run.curve("gradient_norm") is None
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.write(step_line(4, 0, t=4.0, grad_norm=1.5))
    assert curve_answer(run.look_once(), "gradient_norm")["mean"] == [None, None, None, 1.5]
