"""A run directory that somebody forged, under every tool: it is read as far as it can be, and nothing outside of it is."""

import json
import os

import pytest

from shoal.core.errors import RequestError
from shoal.dashboard.exporters.prometheus import render
from shoal.dashboard.exporters.service import Gatherer
from shoal.dashboard.exporters.wholerun import export_trace
from shoal.dashboard.report.gather import gather
from shoal.dashboard.report.page import build_page
from shoal.dashboard.report.words import card_lines
from shoal.dashboard.terminal.comparing import compare, lines_of
from shoal.dashboard.terminal.drawing import plain_lines
from shoal.dashboard.terminal.listing import cells_of, choose_rows, list_folder
from shoal.dashboard.terminal.looking import Looker
from support.dashboard.promtool import check_metrics
from support.dashboard.synthetic import make_run, step_line
from unit.dashboard.test_exporters import parse
from unit.dashboard.test_perfetto import overlaps, read_trace
from unit.dashboard.test_report import check_page

SECRET = "the secret of another folder"
NAME = 'a"b\\c\x1b[31m<script>x</script>'
DEEP = "[" * 50_000 + "]" * 50_000
WILD_STEPS = (
    step_line(1, 0, t=1.0).replace('"step": 1,', '"step": 1e400,'),
    step_line(3, 0, t=1e300),
    step_line(4, 0, t=1_790_000_000.0, seconds=-5.0),
    step_line(5, 0, t=1_790_000_001.0, loss="nan"),
    step_line(6, 0, t=1_790_000_001.0, phases={"<b>\x1b": 1.0, "x" * 5000: 2.0}, wait={"dp": -1.0}),
    step_line(2**62, 0, t=1_790_000_001.0),
    step_line(7, 0, t=1_790_000_009.0, tokens="many"),
    step_line(8, 0, t=100.0),
)
WILD_EVENTS = (
    {"kind": "axis_traffic", "step": 1, "rows": {"dp all_reduce": ["a", 1], "\n": [1, 2, 3], "x": 5}},
    {"kind": "axis_traffic", "step": 1, "rows": []},
    {"kind": "forecast", "source": "x", "step_seconds": "soon", "memory_bytes": [1], "traffic": 5},
    {"kind": "placed", "host": ["h"], "device": 5, "coordinates": [1], "threads": 1, "pid": 1},
    {"kind": "spans", "step": 5, "begin": 1e400, "spans": [["cell", "0F0", 0, 1, 0]]},
    {"kind": "spans", "step": 5, "begin": 1_790_000_001.0, "spans": {"a": 1}},
    {
        "kind": "checkpoint_saved",
        "step": 5,
        "path": "/etc/passwd",
        "num_bytes": -1,
        "stall_seconds": 1,
        "write_seconds": 1,
    },
    {"kind": "epoch_receipt", "epoch": {"a": 1}, "rows": "x", "ok": "yes"},
    {"kind": "view", "epoch": 2**70, "replicas": 1, "logical": 1, "members": [], "hosts": [], "cause": ""},
    {"kind": "run_started", "plan": "x", "world_size": 2, "step": 0, "generation": 2**80, "pid": 1},
    {
        "kind": "rank_failed",
        "culprit_rank": 0,
        "step": 1,
        "phase": "\x1b[2J",
        "cause": "x",
        "generation": 0,
        "restarting": False,
    },
    {
        "kind": "update",
        "update": 1,
        "step": 1,
        "lr": 1,
        "workers": ["a"],
        "read": [1],
        "staleness": [2**70],
        "step_sizes": [1],
    },
    {"kind": "evaluated", "step": 1, "split": "<s>\n", "loss": "inf", "accuracy": None, "samples": 1, "seconds": 1},
    {"kind": "warning", "message": {"not": "text"}},
    {"kind": ["x"]},
    {"kind": "\x1b]0;" + "k" * 5000},
)


@pytest.fixture
def forged(tmp_path):
    """A folder with a forged run, an honest one, and a secret outside that links lead to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.jsonl").write_text(json.dumps({"t": 1, "rank": 5, "kind": "warning", "message": SECRET}) + "\n")
    (outside / "secret.json").write_text(json.dumps({"status": "completed", "steps": 1, "weights_sha256": SECRET}))
    make_run(tmp_path / "runs" / "honest", ranks=2, steps=30)
    folder = make_run(tmp_path / "runs" / NAME, ranks=2, steps=10)
    events = folder / "events"
    with (events / "rank-000.jsonl").open("ab") as file:
        file.write("".join(WILD_STEPS).encode())
        for event in WILD_EVENTS:
            file.write(json.dumps({"t": 1_790_000_001.5, "rank": 0, **event}).encode() + b"\n")
        file.write(
            b"\xff\xfe\x00\n" + DEEP.encode() + b"\n" + b'{"t": 1, "kind": "' + b"x" * 3_000_000 + b'"}\n{"t": 1790000'
        )
    (events / "rank-002.jsonl").symlink_to(outside / "secret.jsonl")
    os.mkfifo(events / "rank-003.jsonl")
    (events / "rank-004.jsonl").mkdir()
    (folder / "summary.json").unlink()
    (folder / "summary.json").symlink_to(outside / "secret.json")
    (folder / "plan.json").write_text('{"plan": ["x"], "ps": "many", "total_steps": -5, "world_size": {}}')
    (folder / "forecast.json").write_text(DEEP)
    (folder / "live.json").write_text(
        '{"t": "x", "status": "running", "ranks": [{"rank": [1], "state": {}}], "hang": [1]}'
    )
    (folder / "proof.json").write_text('{"plans": [1, {"ok": "x"}], "mutants": [null], "ok": 7}')
    return tmp_path / "runs"


def test_the_list(forged):
    found = list_folder(forged)
    shown = [cells_of(row, found["now"]) for row in choose_rows(found["runs"], filter_text=None, sort="loss", top=None)]
    assert len(shown) == 2 and all(cell.isprintable() for cells in shown for cell in cells)
    assert SECRET not in json.dumps(found, allow_nan=False)


def test_top(forged):
    looker = Looker(forged / NAME)
    text = "\n".join(plain_lines(looker.take()))
    assert "\x1b" not in text and SECRET not in text
    assert SECRET not in json.dumps(looker.last.as_dict(), allow_nan=False)


def test_the_report(forged):
    parts = gather(forged / NAME)
    text = "\n".join(f"{name} {value}" for name, value in card_lines(parts.card))
    page = build_page(parts)
    check_page(page)
    assert SECRET not in text + page and "\x1b" not in text
    assert "rank-002.jsonl" in text and "rank-003.jsonl" in text, "it says what it skipped"
    assert parts.card["broken_lines"] >= 5


def test_metrics(forged):
    text = render(Gatherer(forged).snapshot().families)
    check_metrics(text)
    values = parse(text)
    assert values['shoal_steps_total{run="honest"}'] == 30 and SECRET not in text


def test_the_trace(forged, tmp_path):
    export_trace(forged / NAME, tmp_path / "t.json")
    events = read_trace(tmp_path / "t.json")
    assert overlaps(events) == [] and SECRET not in (tmp_path / "t.json").read_text()


def test_the_comparison(forged):
    found = compare(forged / NAME, forged / "honest")
    text = "\n".join(lines_of(found))
    assert "first difference" in text and "\x1b" not in text and SECRET not in text
    with pytest.raises(RequestError, match="same run"):
        compare(forged / "honest", forged / "honest" / "." / ".." / "honest")
