"""What the supervisor writes for others to see: whole texts, never more often than asked, and nothing that can end a run."""

import json
import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.core.rundir import RunDir
from shoal.launch.group.livefile import LiveFile, LiveProcess
from shoal.telemetry.statusboard import StatusReading


def process(rank=0, *, age=0.1, phase="forward", count=1, is_running=True, step=3, metrics=None, **more):
    heartbeat = None if age is None else time.monotonic() - age
    state = StatusReading(
        rank=rank, pid=100 + rank, heartbeat=heartbeat, step=step, phase=phase, phase_count=count, metrics=metrics or {}
    )
    return LiveProcess(state=state, pid=100 + rank, is_running=is_running, **more)


def read(folder):
    return json.loads(RunDir(folder).live.read_text())


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("shoal.launch.group.livefile.time.monotonic", lambda: now[0])
    return now


def test_it_says_where_every_process_is(tmp_path):
    live = LiveFile(tmp_path, plan="ps=1 workers=1", seconds=1.0)
    live.update([process(0, metrics={"loss": 2.5}), process(1, name="worker-0", host="b", rss_bytes=7)], generation=2)
    found = read(tmp_path)
    assert (found["status"], found["plan"], found["generation"], found["pid"]) == (
        "running",
        "ps=1 workers=1",
        2,
        os.getpid(),
    )
    first, second = found["ranks"]
    assert (first["rank"], first["pid"], first["step"], first["phase"]) == (0, 100, 3, "forward")
    assert first["state"] == "running" and first["metrics"] == {"loss": 2.5} and "name" not in first
    assert 0.1 <= first["heartbeat_age"] < 0.5
    assert (second["name"], second["host"], second["rss_bytes"]) == ("worker-0", "b", 7)
    assert first["host"] == found["host"] and found["hang"] is None
    live.update([process(0, is_running=False), process(1, is_running=False)])
    live.end()
    assert read(tmp_path)["status"] == "ended"
    assert [rank["state"] for rank in read(tmp_path)["ranks"]] == ["ended", "ended"]


def test_it_is_not_written_more_often_than_asked(tmp_path, clock):
    live, written = LiveFile(tmp_path, plan="dp=1", seconds=1.0), []
    for _ in range(50):
        live.update([process()])
        written.append(RunDir(tmp_path).live.stat().st_ino)
        clock[0] += 0.1
    changes = 1 + sum(a != b for a, b in pairwise(written))
    assert changes == 5, "once a second in five seconds"


def test_never_means_no_file(tmp_path):
    live = LiveFile(tmp_path, plan="dp=1", seconds=0.0)
    live.update([process()])
    live.end()
    assert list(tmp_path.iterdir()) == []


def test_one_that_does_not_beat_is_silent_with_its_phase_and_holds_the_others_up(tmp_path):
    live = LiveFile(tmp_path, plan="dp=2", seconds=1.0)
    live.update([process(0, phase="wait: gradients"), process(1, age=1.5, phase="backward")])
    found = read(tmp_path)
    assert [rank["state"] for rank in found["ranks"]] == ["running", "silent"]
    hang = found["hang"]
    assert (hang["rank"], hang["phase"]) == (1, "backward") and 1.5 <= hang["seconds"] < 2.0


def test_one_that_runs_in_circles_while_the_others_wait_holds_them_up(tmp_path, clock):
    live = LiveFile(tmp_path, plan="dp=2", seconds=1.0)
    rows = [("wait: gradients", 9), ("forward", 8)]
    for _ in range(9):
        live.update([process(rank, age=0, phase=phase, count=count) for rank, (phase, count) in enumerate(rows)])
        assert read(tmp_path)["hang"] is None, "that may be a long step"
        clock[0] += 1.0
    for _ in range(3):
        clock[0] += 1.0
        live.update([process(rank, age=0, phase=phase, count=count) for rank, (phase, count) in enumerate(rows)])
    assert read(tmp_path)["hang"]["rank"] == 1
    assert read(tmp_path)["ranks"][1]["phase_seconds"] == pytest.approx(12.0)
    # Phases as long as that are usual once one has ended.
    clock[0] += 10.0
    live.update([process(0, age=0, phase="wait: gradients", count=10), process(1, age=0, phase="forward", count=9)])
    clock[0] += 20.0
    live.update([process(0, age=0, phase="wait: gradients", count=10), process(1, age=0, phase="forward", count=9)])
    assert read(tmp_path)["hang"] is None


def test_the_heartbeat_of_the_process_before_proves_nothing(tmp_path):
    live = LiveFile(tmp_path, plan="dp=1", seconds=1.0)
    old = process(0, age=30.0, phase="backward")
    live.update([LiveProcess(state=old.state, pid=999, is_running=True)])
    assert (read(tmp_path)["ranks"][0]["state"], read(tmp_path)["ranks"][0]["phase"]) == ("running", "")


@pytest.mark.parametrize("trouble", ["gone", "full", "a folder in its place", "not JSON"])
def test_a_disk_that_does_not_take_it_costs_the_file_and_nothing_else(tmp_path, clock, trouble):
    folder = tmp_path / "run"
    folder.mkdir()
    live = LiveFile(folder, plan="dp=1", seconds=1.0)
    live.update([process()])
    metrics = {}
    if trouble == "gone":
        RunDir(folder).live.unlink()
        folder.rmdir()
    elif trouble == "full":
        live._path = Path("/dev/full/live.json") if os.path.isdir("/dev/full") else Path("/proc/live.json")
    elif trouble == "a folder in its place":
        RunDir(folder).live.unlink()
        RunDir(folder).live.mkdir()
    else:
        metrics = {"loss": float("nan"), "what": object()}
    clock[0] += 2.0
    live.update([process(metrics=metrics)])
    live.end()
    if trouble == "gone":
        folder.mkdir()
    if trouble == "a folder in its place":
        RunDir(folder).live.rmdir()
    if trouble != "full":
        clock[0] += 2.0
        live.update([process(metrics=metrics)])
        assert read(folder)["status"] == "running", "it is tried again"
        assert [path.name for path in folder.iterdir()] == ["live.json"], "nothing half written is left"
    if trouble == "not JSON":
        assert read(folder)["ranks"][0]["metrics"]["loss"] == "nan"


def test_a_reader_finds_whole_texts_while_it_is_rewritten(tmp_path):
    live, is_over, broken, seen = LiveFile(tmp_path, plan="dp=64", seconds=1e-9), threading.Event(), [], []
    live.update([process()])

    def look():
        while not is_over.is_set():
            text = RunDir(tmp_path).live.read_text()
            try:
                seen.append(len(json.loads(text)["ranks"]))
            except ValueError:
                broken.append(text)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(200):
        live.update([process(rank, metrics={"x": "y" * (number % 50)}) for rank in range(1 + number % 64)])
    is_over.set()
    reader.join()
    assert not broken and seen
