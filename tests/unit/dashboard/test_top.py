"""``shoal top`` without processes: pictures of runs in every state, what is drawn of them, and files that lie."""

import io
import json
import math
import os
import time

import pytest
from rich.console import Console

from shoal.core.errors import RequestError, RunError
from shoal.dashboard.runs.run import Run
from shoal.dashboard.terminal.drawing import age, draw, plain_lines, seconds
from shoal.dashboard.terminal.looking import Looker
from shoal.dashboard.terminal.picture import RankLine, most_important, take_picture
from shoal.dashboard.terminal.top import watch
from shoal.dashboard.views.overview import run_row
from support.dashboard.synthetic import make_run


def live_file(folder, *, t: float, hang: dict | None = None, **changed: dict) -> None:
    rows = [
        {
            "rank": rank,
            "host": f"node{rank}",
            "pid": 100 + rank,
            "step": 40 + rank,
            "phase": "backward",
            "phase_seconds": 0.25,
            "heartbeat_age": 0.1,
            "rss_bytes": (rank + 1) << 30,
            "state": "running",
            "metrics": {},
            **changed.get(f"rank_{rank}", {}),
        }
        for rank in range(2)
    ]
    live = {
        "t": t,
        "generation": 0,
        "status": "running",
        "plan": "dp=2",
        "pid": 1,
        "host": "a",
        "ranks": rows,
        "hang": hang,
    }
    path = folder / "live.json"
    path.write_text(json.dumps(live))
    os.utime(path, (t, t))


def picture_of(folder, now: float, story: tuple[str, ...] = ()):
    run = Run(folder).look_once()
    return take_picture(run, run_row(run, now), story, now)


@pytest.fixture
def going(tmp_path):
    """A run of two ranks under way, the first of which is slow; and now."""
    now = time.time()
    return make_run(tmp_path / "run", ranks=2, steps=50, begin=now - 5.0, status=None, slow=(0, 1.4)), now


def drawn(picture, *, width: int = 140, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(draw(picture, width=width, height=height))
    return console.file.getvalue()


def test_every_rank_is_where_live_json_says_and_as_fast_as_its_events_say(going):
    folder, now = going
    live_file(folder, t=now)
    found = picture_of(folder, now)
    assert (found.status, found.step, found.total_steps, found.warnings) == ("running", 50, 50, ())
    first, second = found.ranks
    assert (first.rank, first.host, first.state, first.step, first.phase) == (0, "node0", "running", 40, "backward")
    assert first.memory_bytes == 1 << 30 and second.memory_bytes == 2 << 30 and second.phase_seconds == 0.25
    events = [json.loads(line) for line in (folder / "events" / "rank-001.jsonl").read_text().splitlines()][-20:]
    waits = [event["wait_seconds"]["dp"] for event in events]
    assert second.waits["dp"] == pytest.approx(sum(waits) / 20, rel=1e-5)
    assert second.waits["data"] == pytest.approx(0.004) and second.step_seconds == pytest.approx(0.1)
    assert first.busy_seconds > 1.2 * second.busy_seconds
    text = drawn(found)
    assert "node0" in text and "backward" in text and "wait dp" in text and "2.0 GiB" in text and "step 50/50" in text


@pytest.mark.parametrize(
    ("changed", "hang", "mark", "warning"),
    [
        (
            {},
            {"rank": 1, "phase": "dp all_reduce", "seconds": 42.0},
            "HANGING",
            "rank 1 hangs on node1 in dp all_reduce",
        ),
        ({"rank_1": {"state": "silent", "heartbeat_age": 31.0}}, None, "SILENT", "no sign of life for 31 s"),
    ],
)
def test_a_rank_that_hangs_or_says_nothing_is_marked_with_its_phase(going, changed, hang, mark, warning):
    folder, now = going
    live_file(folder, t=now, hang=hang, **changed)
    found = picture_of(folder, now)
    assert found.status == "silent" and len(found.warnings) == 1 and warning in found.warnings[0]
    assert [line.state for line in found.ranks] == ["running", mark.lower()]
    assert mark in drawn(found) and any(mark in line for line in plain_lines(found))


def test_a_supervisor_that_is_gone_is_said(going):
    folder, now = going
    live_file(folder, t=now - 60)
    found = picture_of(folder, now)
    assert found.status == "silent"
    assert any("stopped rewriting live.json" in line for line in found.warnings)
    assert any("60 s ago" in line for line in found.warnings)


def test_a_run_that_failed_names_the_rank_and_the_others_have_ended(tmp_path):
    folder = make_run(tmp_path / "run", ranks=2, steps=20, status="failed")
    failed = {"culprit_rank": 1, "step": 20, "phase": "backward", "cause": "killed by signal 9", "generation": 0}
    event = {"t": 1_790_000_009.0, "rank": None, "kind": "rank_failed", **failed, "restarting": False}
    (folder / "events" / "supervisor.jsonl").write_text(json.dumps(event) + "\n")
    found = picture_of(folder, 1_790_000_100.0)
    assert found.is_over and found.warnings == ("rank 1 failed in backward: killed by signal 9",)
    assert [line.state for line in found.ranks] == ["ended", "died"]
    assert "DIED" in drawn(found)


def test_a_run_that_has_only_begun_has_a_picture(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    found = picture_of(tmp_path, time.time())
    assert found.ranks == () and found.loss is None
    assert drawn(found) and plain_lines(found)


WILD = (
    '{"t": 1e400, "status": "running", "ranks": [1, null, {"rank": "x"}, {"rank": 0, "step": 1e400, "rss_bytes": "a"}]}',
    '{"status": "running", "t": "soon", "hang": {"rank": {"a": 1}}, "ranks": {"rank": 0}}',
    '{"status": "running", "t": -5, "hang": 7, "ranks": [{"name": "\\u001b[2J<b>", "phase": ["x"], "state": 5}]}',
    '{"status": ["running"], "ranks": [{}]}',
    "[]",
    "{",
)


@pytest.mark.parametrize("text", WILD)
def test_a_live_json_that_lies_breaks_nothing(going, text):
    folder, now = going
    (folder / "live.json").write_text(text)
    found = picture_of(folder, now, story=("\x1b]0;title\x07 story",))
    shown = drawn(found) + "".join(plain_lines(found))
    assert "\x1b" not in shown and "\x07" not in shown
    json.dumps(found.as_dict(), allow_nan=False)


def test_of_a_thousand_ranks_those_with_a_mark_and_the_busiest_are_shown(going):
    lines = [RankLine(rank=rank, name=f"rank {rank}", busy_seconds=float(rank % 100)) for rank in range(1000)]
    lines[500] = RankLine(rank=500, name="rank 500", state="hanging", busy_seconds=0.0)
    kept = [line.rank for line in most_important(lines, 11)]
    assert kept == sorted(kept) and 500 in kept and {99, 199, 999} <= set(kept)
    folder, now = going
    found = picture_of(folder, now)
    many = type(found)(**{**vars(found), "ranks": tuple(lines)})
    text = drawn(many, height=24)
    assert len(text.splitlines()) <= 24 and "HANGING" in text and "more; shown are" in text


def test_a_narrow_terminal_leaves_out_columns_and_cuts_none(going):
    folder, now = going
    live_file(folder, t=now)
    wide, narrow = drawn(picture_of(folder, now), width=160), drawn(picture_of(folder, now), width=78)
    assert "heartbeat" in wide and "host" in wide
    assert "heartbeat" not in narrow and "wait dp" in narrow and "running" in narrow and "backward" in narrow
    assert "…" not in narrow


def test_pictures_follow_each_other_until_the_run_is_over(going):
    folder, now = going
    pictures = []

    def take():
        found = picture_of(folder, now)
        pictures.append(found)
        if len(pictures) == 3:
            summary = {"status": "completed", "steps": 50, "final_loss": 1.0}
            (folder / "summary.json").write_text(json.dumps(summary))
        return found

    out = io.StringIO()
    last = watch(take, every=0.0, once=False, stream=out)
    assert last.status == "completed" and len(pictures) == 4
    said = [line for line in out.getvalue().splitlines() if line.startswith("run=")]
    assert len(said) == 2, "lines come only when something has changed"


def test_a_run_that_is_removed_meanwhile_is_said(going):
    folder, _ = going
    looker = Looker(folder)
    looker.take()
    folder.rename(folder.with_name("away"))
    with pytest.raises(RunError, match="removed"):
        looker.take()


def test_what_is_no_run_is_refused_with_what_there_is(tmp_path):
    make_run(tmp_path / "first", steps=1)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in (("frist", "'first'"), ("file", "is a file"), ("empty", "neither"), ("", "1 run directories")):
        with pytest.raises(RequestError, match=words):
            Looker(tmp_path / name)


def test_few_letters():
    assert [seconds(value) for value in (None, 1e-5, 0.0123, 1.5)] == ["", "10 us", "12.3 ms", "1.5 s"]
    assert [age(value) for value in (-5, 30, 119, 120, 7200, 86400 * 30)] == [
        "0 s",
        "30 s",
        "119 s",
        "2 min",
        "2 h",
        "30 d",
    ]
    assert not math.isnan(len(age(0.0)))


def test_on_a_terminal_one_drawing_changes(going, monkeypatch):
    folder, now = going
    monkeypatch.setenv("TERM", "xterm-256color")
    live_file(folder, t=now)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    pictures = []

    def take():
        pictures.append(picture_of(folder, now))
        if len(pictures) == 2:
            (folder / "summary.json").write_text(json.dumps({"status": "completed", "steps": 50}))
        return pictures[-1]

    out = Terminal()
    watch(take, every=0.0, once=False, stream=out)
    assert len(pictures) == 3 and "completed" in out.getvalue() and out.getvalue().count("step time") == 4
    assert "\x1b[1A" in out.getvalue(), "the next drawing begins where the one before did"
    once = Terminal()
    watch(take, every=0.0, once=True, stream=once)
    assert len(pictures) == 4 and "completed" in once.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    plain = Terminal()
    watch(take, every=0.0, once=True, stream=plain)
    assert plain.getvalue().startswith("run=run") and "\x1b" not in plain.getvalue()
