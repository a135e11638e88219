"""Files that grow, are torn, truncated, replaced, or no files at all."""

import json
import os

import pytest

from shoal.dashboard.runs.files import LINE_BYTES, Refused, open_inside
from shoal.dashboard.runs.run import Run
from support.dashboard.synthetic import make_run, started_line, step_line


def losses(run):
    return run.curve("loss").pyramid.values.tolist()


@pytest.fixture
def run(tmp_path):
    made = Run(make_run(tmp_path / "one", steps=3, status=None))
    made.look_once()
    return made


@pytest.fixture
def events(run):
    return run.path / "events" / "rank-000.jsonl"


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_only_what_grew_is_read(run, events, monkeypatch):
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, at: read.append(at) or pread(file, length, at))
    size = events.stat().st_size
    append(events, step_line(4, 0, t=1.0, loss=0.25))
    run.look_once()
    assert losses(run)[3] == 0.25
    assert min(read) >= size - 256
    read.clear()
    run.look_once()
    assert read == []


def test_a_torn_last_line_waits_for_its_end(run, events):
    line = step_line(4, 0, t=1.0, loss=0.25)
    append(events, line[:50])
    assert len(losses(run.look_once())) == 3
    append(events, line[50:])
    assert losses(run.look_once())[3] == 0.25
    assert run.broken_lines == 0


@pytest.mark.parametrize("replace", [False, True], ids=["truncated", "replaced"])
def test_a_file_that_begins_anew_is_read_anew(run, events, replace):
    text = step_line(1, 0, t=1.0, loss=0.5)
    if replace:
        beside = events.with_name("beside")
        # Longer than what was read: only its identity and its bytes say that it is another one.
        text = "".join(step_line(step, 0, t=float(step), loss=0.5) for step in range(1, 30))
        beside.write_text(text)
        os.replace(beside, events)
    else:
        events.write_text(text)
    assert set(losses(run.look_once())) == {0.5}
    assert run.files["rank-000.jsonl"].restarts == 1


def test_lines_that_are_no_events_are_counted_and_passed_over(run, events):
    broken = [
        '{"t": 1, "kind": "step", "step": 4',
        '{"t": 1.0, "rank": 0, "kind": "step", "step": -1}',
        '{"t": NaN, "kind": "warning", "message": "x"}',
        '{"t": 1e400, "kind": "warning", "message": "x"}',
        '{"t": 1e300, "kind": "warning", "message": "x"}',
        '{"t": 1.0, "kind": "warning"}',
        "[1, 2]",
        "[" * 20_000,
        '{"t": 1.0, "kind": ["step"]}',
        "\x00\x00",
    ]
    append(events, "\n".join(broken) + "\n" + step_line(4, 0, t=1.0, loss=0.25))
    run.look_once()
    assert run.broken_lines == len(broken)
    assert losses(run)[3] == 0.25


def test_a_gigantic_line_is_skipped_and_counted_in_little_memory(run, events):
    append(events, '{"t": 1.0, "kind": "warning", "message": "' + "x" * (10 * LINE_BYTES))
    run.look_once()
    append(events, '"}\n' + step_line(4, 0, t=1.0, loss=0.25))
    run.look_once()
    assert run.long_lines == 1 and run.broken_lines == 0
    assert losses(run)[3] == 0.25


def test_kinds_of_a_newer_version_are_counted(run, events):
    append(events, json.dumps({"t": 1.0, "rank": 0, "kind": "teleported", "to": "mars"}) + "\n")
    assert run.look_once().unknown_kinds == {"teleported": 1}
    assert run.events("teleported")[0]["to"] == "mars"


def test_values_that_are_not_finite_are_kept_as_such(run, events):
    append(
        events,
        step_line(4, 0, t=1.0, loss="nan") + step_line(5, 0, t=1.0, loss="inf") + step_line(6, 0, t=2.0, loss=1.0),
    )
    curve = run.look_once().curve("loss")
    _, buckets, _ = curve.window("step", None, None, 2)
    assert buckets.bad.sum() == 2
    assert buckets.high.max() < 10


def test_a_restart_takes_back_what_came_after_its_checkpoint(run, events):
    append(events, started_line(0, t=2.0, step=1, generation=1) + step_line(2, 0, t=3.0, loss=20.0))
    curve = run.look_once().curve("loss")
    assert curve.axes["step"].tolist() == [1, 2]
    assert curve.pyramid.values[1] == 20.0
    append(events, step_line(3, 0, t=4.0, loss=30.0) + step_line(4, 0, t=5.0, loss=40.0))
    curve = run.look_once().curve("loss")
    assert curve.pyramid.values[1:].tolist() == [20.0, 30.0, 40.0]
    assert curve.axes["samples"].tolist() == [16, 32, 48, 64]


def test_time_never_goes_back_when_a_clock_does(tmp_path):
    run = make_run(tmp_path / "one", steps=0, status=None)
    times = [100.0, 50.0, 101.0, 5.0, 102.0]
    append(run / "events" / "rank-000.jsonl", "".join(step_line(n + 1, 0, t=t) for n, t in enumerate(times)))
    time = Run(run).look_once().curve("loss").axes["time"]
    assert time.tolist() == sorted(time.tolist()) and time[-1] == pytest.approx(2.1)


def test_what_is_no_plain_file_inside_is_not_read(tmp_path):
    secret = tmp_path / "secret.jsonl"
    secret.write_text(step_line(7, 0, t=1.0, loss=7.0))
    run = make_run(tmp_path / "runs" / "one", steps=2, status=None)
    os.mkfifo(run / "events" / "rank-001.jsonl")
    os.symlink(secret, run / "events" / "rank-002.jsonl")
    os.symlink("/dev/zero", run / "events" / "rank-003.jsonl")
    (run / "events" / "rank-004.jsonl").mkdir()
    os.symlink(tmp_path / "secret.jsonl", run / "summary.json")
    found = Run(run).look_once()
    assert len(found.skipped) == 5 and "FIFO" in found.skipped["events/rank-001.jsonl"]
    assert "leads out" in found.skipped["events/rank-002.jsonl"] and "leads out" in found.skipped["summary.json"]
    assert "device" in found.skipped["events/rank-003.jsonl"]
    assert [file.rank for file in found.ranks if file.steps.rows] == [0]


def test_a_folder_that_is_a_link_to_elsewhere_is_not_listed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rank-000.jsonl").write_text(step_line(7, 0, t=1.0))
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    os.symlink(outside, run / "events")
    assert Run(run).look_once().files == {}


def test_a_way_out_is_refused_after_the_file_was_opened(tmp_path):
    inside = tmp_path / "runs"
    inside.mkdir()
    (tmp_path / "runs-of-others").write_text("x")
    os.symlink(tmp_path / "runs-of-others", inside / "link")
    with pytest.raises(Refused, match="leads out"):
        open_inside(inside, inside / "link")


def test_small_files_are_read_again_when_they_change(run):
    assert run.summary is None
    (run.path / "summary.json").write_text('{"status": "completed"}')
    assert run.look_once().summary == {"status": "completed"}
    (run.path / "summary.json").write_text('{"status": ')
    assert run.look_once().summary is None and "no JSON" in run.skipped["summary.json"]
    (run.path / "summary.json").unlink()
    assert run.look_once().skipped == {}


def test_a_rank_that_comes_later_is_found(run, events):
    beside = events.with_name("rank-001.jsonl")
    beside.write_text(step_line(1, 1, t=1.0))
    assert [file.rank for file in run.look_once().ranks] == [0, 1]


def test_many_events_are_kept_in_bounded_memory(run, events):
    append(
        events,
        "".join(json.dumps({"t": 1.0, "rank": 0, "kind": "warning", "message": str(n)}) + "\n" for n in range(7000)),
    )
    found = run.look_once().files["rank-000.jsonl"].kept["warning"]
    shown = [event["message"] for event in run.events("warning")]
    assert found.count == 7000 and len(shown) == 5000
    assert shown[0] == "0" and shown[-1] == "6999"
