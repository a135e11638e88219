"""How a run is doing, by all that may be in its directory."""

import json
import os

import pytest

from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.overview import run_answer, run_row
from shoal.dashboard.views.status import culprit_of, status_of
from support.dashboard.synthetic import make_run, started_line, step_line

BEGIN = 1_790_000_000.0
NOW = BEGIN + 10.2


def live(path, *, t=NOW, states=("running", "running"), hang=None, status="running"):
    ranks = [
        {"rank": rank, "host": "node-1", "pid": 1, "step": 100, "phase": "backward", "phase_seconds": 0.1, "heartbeat_age": 0.1,
         "rss_bytes": 1000 + rank, "state": state, "metrics": {}}
        for rank, state in enumerate(states)
    ]  # fmt: skip
    file = path / "live.json"
    file.write_text(
        json.dumps(
            {
                "t": t,
                "generation": 0,
                "status": status,
                "plan": "dp=2",
                "pid": 1,
                "host": "node-1",
                "ranks": ranks,
                "hang": hang,
            }
        )
    )
    os.utime(file, (t, t))


@pytest.fixture
def path(tmp_path):
    return make_run(tmp_path / "one", ranks=2, steps=100, status=None, begin=BEGIN)


def status(path, now=NOW):
    return status_of(Run(path).look_once(), now)


@pytest.mark.parametrize("said", ["completed", "interrupted", "failed"])
def test_the_summary_says_how_it_ended(tmp_path, said):
    assert status(make_run(tmp_path / "two", steps=3, status=said)) == said


def test_a_summary_of_the_run_before_does_not_count(tmp_path):
    path = make_run(tmp_path / "two", steps=3, status="failed", begin=BEGIN)
    os.utime(path / "summary.json", (BEGIN, BEGIN))
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.write(started_line(0, t=BEGIN + 9, step=2, generation=0) + step_line(3, 0, t=BEGIN + 10))
    assert status(path) == "running"


def test_a_run_without_live_json_is_silent_when_nothing_comes(path):
    assert status(path) == "running"
    assert status(path, NOW + 3600) == "silent"


def test_a_supervisor_that_died_is_seen_within_seconds(path):
    live(path)
    assert status(path) == "running"
    assert status(path, NOW + 10) == "silent"
    found = culprit_of(Run(path).look_once(), "silent")
    assert found is not None and "supervisor" in found.cause


HOUR = 3600.0


@pytest.mark.parametrize("ahead", [HOUR, -HOUR, 0.0])
def test_a_supervisor_is_judged_by_our_own_clock(path, ahead):
    """Clocks of hosts and file servers an hour off: a dead one never looks alive, and a live one does from its next word on."""
    seconds = [0.0]
    live(path, t=NOW + ahead)
    run = Run(path, clock=lambda: seconds[0]).look_once()
    at_first = "running" if ahead == 0.0 else "silent"
    assert status_of(run, NOW) == at_first
    for _ in range(20):
        seconds[0] += 1.0
        live(path, t=NOW + ahead + seconds[0])
        assert status_of(run.look_once(), NOW + seconds[0]) == "running"
    rewritten = seconds[0]
    while seconds[0] < rewritten + 600:
        seconds[0] += 2.0
        dead = status_of(run.look_once(), NOW + seconds[0])
        assert dead == ("running" if seconds[0] < rewritten + 6 else "silent")


def test_a_run_that_nobody_supervises_is_judged_so_too(path):
    """Without a live.json, its events a day behind our clock."""
    seconds = [0.0]
    run = Run(path, clock=lambda: seconds[0]).look_once()
    now = NOW + 24 * HOUR
    assert status_of(run, now) == "silent"
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.write(step_line(101, 0, t=NOW))
    seconds[0] += 30
    assert status_of(run.look_once(), now + 30) == "running"
    seconds[0] += 61
    assert status_of(run.look_once(), now + 91) == "silent"


def test_a_rank_that_is_silent_is_the_culprit(path):
    live(path, states=("running", "silent"))
    run = Run(path).look_once()
    assert status_of(run, NOW) == "silent"
    found = culprit_of(run, "silent")
    assert (found.rank, found.host, found.phase) == (1, "node-1", "backward")


def test_who_hangs_by_the_supervisors_word_is_the_culprit(path):
    live(path, hang={"rank": 0, "phase": "wait: batch", "seconds": 12.4})
    row = run_row(Run(path).look_once(), NOW)
    assert row["status"] == "silent"
    assert row["culprit"] == {
        "rank": 0,
        "host": "node-1",
        "phase": "wait: batch",
        "cause": "in the same phase for 12 s",
    }


def test_a_death_without_a_restart_is_a_failure(path):
    failed = {
        "culprit_rank": 1,
        "step": 100,
        "phase": "backward",
        "cause": "killed",
        "generation": 0,
        "restarting": False,
    }
    with (path / "events" / "supervisor.jsonl").open("w") as file:
        file.write(json.dumps({"t": NOW, "rank": None, "kind": "rank_failed", **failed}) + "\n")
    live(path, status="ended")
    row = run_row(Run(path).look_once(), NOW)
    assert row["status"] == "failed" and row["culprit"]["rank"] == 1 and row["culprit"]["cause"] == "killed"


def test_numbers_of_a_row_are_those_of_the_events(path):
    live(path)
    row = run_row(Run(path).look_once(), NOW)
    assert (row["step"], row["total_steps"], row["world_size"], row["plan"]) == (100, 100, 2, "dp=2")
    assert (
        row["loss"] == pytest.approx(0.6) and row["tokens_per_s"] == pytest.approx(5120) and row["memory_bytes"] == 1001
    )
    assert row["step_seconds"] == pytest.approx(0.1) and row["eta_s"] == 0 and len(row["spark"]) <= 60


@pytest.mark.parametrize(
    "name, content",
    [
        ("live.json", '{"status": "running", "ranks": 3, "hang": [1], "t": "x"}'),
        (
            "live.json",
            '{"status": "running", "ranks": [1, null, {"state": "silent"}], "hang": {"rank": {}, "seconds": "y"}}',
        ),
        (
            "summary.json",
            '{"status": ["completed"], "peak_rss_bytes": {"a": 1}, "weights_sha256": 7, "tokens_per_s": 1e400}',
        ),
        ("summary.json", '{"status": "completed", "peak_rss_bytes": [null, "x", -1], "tokens_per_s": "fast"}'),
        ("plan.json", '{"plan": 7, "ps": "many", "total_steps": -4, "dp": [2], "schedule": {}}'),
        ("plan.json", "[]"),
        ("recipe.toml", "\x00\xff not toml ]["),
        ("proof.json", '{"plans": [1, {"ok": 3}], "mutants": [null]}'),
    ],
)
def test_files_with_anything_in_them_break_nothing(path, name, content):
    (path / name).write_text(content, errors="surrogateescape")
    run = Run(path).look_once()
    answer = run_answer(run, NOW)
    json.dumps(answer, allow_nan=False)


def test_checkpoints_have_a_state(path):
    def saved(step, **more):
        return {"t": BEGIN + step, "rank": 0, "kind": "checkpoint_saved", "step": step, "path": f"x/checkpoints/step-{step:08d}",
                "num_bytes": step, "stall_seconds": 0.1, "write_seconds": 0.2, **more}  # fmt: skip

    refused = {
        "t": BEGIN + 90,
        "rank": 0,
        "kind": "checkpoint_refused",
        "path": "x/checkpoints/step-00000030",
        "reason": "a bit",
    }
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in (saved(10), saved(20), saved(30), refused))
    for step, files in ((20, ("manifest.json", "good")), (30, ("manifest.json",)), (40, ("rank-000.safetensors",))):
        folder = path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).write_text("1234")
    found = run_answer(Run(path).look_once(), NOW)["checkpoints"]
    assert [(one["step"], one["state"], one["reason"]) for one in found] == [
        (10, "gone", ""), (20, "good", ""), (30, "refused", "a bit"), (40, "torn", "")
    ]  # fmt: skip
    assert [one["bytes"] for one in found] == [10, 20, 30, 4]
