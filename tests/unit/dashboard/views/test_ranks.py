"""Ranks beside each other: what is shown is what the events say, and a slow rank is named first."""

import json
import random

import msgspec
import numpy as np
import pytest

from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.forecast import forecast_of
from shoal.dashboard.views.ranks import SCORED_STEPS, ranks_answer, scores
from support.dashboard.synthetic import make_run, started_line


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_is_a_fifth_busier_is_first_within_twenty_steps(seed):
    """With the noise of a shared machine: a tenth up and down, and now and then a step that takes three times as long."""
    draw = np.random.default_rng(seed)
    slow = int(draw.integers(0, 8))
    busy = {}
    for rank in range(8):
        values = 0.1 * draw.lognormal(0, 0.1, SCORED_STEPS)
        values[draw.random(SCORED_STEPS) < 0.05] *= 3
        busy[rank] = values * (1.2 if rank == slow else 1.0)
    found = scores(busy)
    assert found[0]["rank"] == slow
    assert 1.05 < found[0]["score"] < 1.4


def test_equal_ranks_have_scores_of_one():
    found = scores({rank: np.full(30, 0.1) for rank in range(4)})
    assert [one["rank"] for one in found] == [0, 1, 2, 3] and {one["score"] for one in found} == {1.0}


def test_a_rank_that_became_slower_than_it_was_is_seen():
    found = scores({0: np.concatenate([np.full(40, 0.1), np.full(20, 0.15)]), 1: np.full(60, 0.15)})
    assert {one["rank"]: one["against_own"] for one in found} == pytest.approx({0: 1.5, 1: 1.0})
    assert {one["score"] for one in found} == {1.0}


def test_what_is_shown_is_what_the_events_say(tmp_path):
    path = make_run(tmp_path / "one", ranks=3, steps=50, slow=(2, 1.3))
    answer = ranks_answer(Run(path).look_once(), bins=10)
    assert answer["ranks"] == [0, 1, 2] and answer["scores"][0]["rank"] == 2
    assert answer["bins"] == [[first, first + 4] for first in range(1, 51, 5)]
    lines = (path / "events" / "rank-001.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["kind"] == "step"]
    for column, (first, last) in enumerate(answer["bins"]):
        inside = [event for event in steps if first <= event["step"] <= last]
        mean = sum(event["seconds"] for event in inside) / len(inside)
        wait = sum(event["wait_seconds"]["dp"] for event in inside) / len(inside)
        assert answer["step"][1][column] == pytest.approx(mean, rel=1e-3)
        assert answer["wait"][1][column] == pytest.approx(wait, rel=1e-3)
        assert answer["busy"][1][column] == pytest.approx(mean - wait - 0.004, rel=1e-3)


def test_a_window_of_steps_is_that_window(tmp_path):
    answer = ranks_answer(Run(make_run(tmp_path / "one", ranks=2, steps=50)).look_once(), first=11, last=20, bins=5)
    assert answer["bins"] == [[11, 12], [13, 14], [15, 16], [17, 18], [19, 20]]


def test_an_answer_of_many_ranks_is_not_long(tmp_path):
    path = make_run(tmp_path / "one", ranks=256, steps=40)
    for rank in range(256):
        parts = ("weights", "gradient", "optimizer", "other", "rss", "peak_rss")
        events = [
            {"kind": "memory", "step": 10, **{f"{part}_bytes": 12_345_678_901 + rank for part in parts}},
            {"kind": "forecast", "source": "layout", "memory_bytes": {str(rank): {"weights": 12_345_678_901}}},
            {"kind": "placed", "host": f"node-{rank}", "device": "cuda:0", "local_rank": 0, "coordinates": {"dp": rank},
             "threads": 1, "pid": 1},
        ]  # fmt: skip
        with (path / "events" / f"rank-{rank:03d}.jsonl").open("a") as file:
            file.writelines(json.dumps({"t": 1_790_000_009.0, "rank": rank, **event}) + "\n" for event in events)
    answer = ranks_answer(Run(path).look_once(), bins=400)
    assert len(answer["ranks"]) == len(answer["memory"]) == len(answer["mesh"]["places"]) == 256
    assert len(answer["bins"]) > 5 and len(msgspec.json.encode(answer)) < 200_000


def test_memory_traffic_and_forecast_are_side_by_side(tmp_path):
    path = make_run(tmp_path / "one", ranks=3, steps=10, more={"dp": 2})
    draw, weights = random.Random(1), []

    def forecast(rank, weights):
        # As ranks say it: each its own part.
        return {
            "t": 1.0, "rank": rank, "kind": "forecast", "source": "layout", "step_seconds": None, "bubble": None,
            "memory_bytes": {str(rank): {"weights": weights}}, "traffic": {str(rank): {"dp all_reduce": [1, 1000]}},
        }  # fmt: skip

    for rank in range(3):
        started = json.loads(started_line(rank, t=1_790_000_100.0, generation=1))
        again = [forecast(rank, 7), started, forecast(rank, 100 * (rank + 1))]
        # The third rank was of the first start alone, which was a larger one.
        again = again if rank < 2 else again[:1]
        parts = ("weights", "gradient", "optimizer", "other", "rss", "peak_rss")
        memory = {f"{part}_bytes": draw.randrange(10**6) for part in parts}
        weights.append(memory["weights_bytes"])
        events = [
            {"t": 2.0, "rank": rank, "kind": "memory", "step": 10, **memory},
            {"t": 2.0, "rank": rank, "kind": "axis_traffic", "step": 10, "rows": {"dp all_reduce": [10, 9000, 0.5]}},
            {"t": 2.0, "rank": rank, "kind": "placed", "host": "h", "device": "cpu", "local_rank": rank,
             "coordinates": {"dp": rank}, "threads": 1, "pid": 1},
        ]  # fmt: skip
        with (path / "events" / f"rank-{rank:03d}.jsonl").open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in again + events)
    answer = ranks_answer(Run(path).look_once())
    assert [one["predicted"] for one in answer["memory"]] == [{"weights": 100}, {"weights": 200}]
    assert answer["memory"][1]["measured"]["weights"] == weights[1]
    assert answer["traffic"] == [
        {"axis": "dp", "operation": "all_reduce", "calls": 20, "bytes": 18000, "seconds": 1.0, "forecast_bytes": 20000}
    ]
    assert answer["mesh"]["axes"] == [["dp", 2]]
    assert [place["coordinates"] for place in answer["mesh"]["places"]][:2] == [{"dp": 0}, {"dp": 1}]


def test_what_a_rehearsal_left_is_the_forecast_until_ranks_say_theirs(tmp_path):
    path = make_run(tmp_path / "one", ranks=2, steps=10)
    page = {"plan": "dp=2", "machine": "x", "seconds": 0.125, "bubble": 0.25,
            "ranks": [{"state_bytes": {"weights": 10, "gradients": 5}, "peak_bytes": 100, "traffic": {"dp all_reduce": [1, 8]}},
                      {"state_bytes": {"weights": 11, "gradients": 5}, "traffic": {}}]}  # fmt: skip
    (path / "forecast.json").write_text(json.dumps(page))
    run = Run(path).look_once()
    found = forecast_of(run)
    assert (found["step_seconds"], found["bubble"], found["source"]) == (0.125, 0.25, "rehearsal")
    assert found["memory_bytes"] == {
        "0": {"weights": 10, "gradients": 5, "other": 85},
        "1": {"weights": 11, "gradients": 5},
    }
    assert found["traffic"] == {"0": {"dp all_reduce": [1, 8]}, "1": {}}
    for strange in ("[]", '{"seconds": 1}', '{"seconds": 1, "bubble": 1, "ranks": [{"state_bytes": 5}]}'):
        (path / "forecast.json").write_text(strange)
        assert forecast_of(run.look_once()) is None
