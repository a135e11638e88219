"""A whole run as a trace: in the format, complete, in one time, with nothing that a viewer would draw wrongly."""

import json
import math
import shutil
import subprocess
from collections import defaultdict
from itertools import pairwise

import pytest
from jsonschema import Draft202012Validator

from shoal.dashboard.exporters.perfetto import Count, Instant, Slice, Track, shifts, trace_events, write_trace
from shoal.dashboard.exporters.tracks import tracks_of
from shoal.dashboard.runs.run import Run
from support.dashboard.synthetic import make_run

NUMBER = {"type": "number"}
ID = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "maxLength": 300}


def event(phase: str, **fields: object) -> dict:
    shared = {"ph": {"const": phase}, "pid": ID, "tid": ID, "name": TEXT}
    properties = {**shared, **fields}
    optional = {"args", "cat"}
    required = sorted(set(properties) - optional)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# The parts of the trace event format that are written: metadata, complete slices, counters and instants.
SCHEMA = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object", "additionalProperties": {"type": "string"}},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    event("M", args={"type": "object", "minProperties": 1}),
                    event("X", ts=NUMBER, dur={"type": "number", "minimum": 0}, cat=TEXT, args={"type": "object"}),
                    event("C", ts=NUMBER, args={"type": "object", "additionalProperties": NUMBER, "minProperties": 1}),
                    event("i", ts=NUMBER, s={"enum": ["g", "p", "t"]}, args={"type": "object"}),
                ]
            },
        },
    },
}


def refuse_constant(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def read_trace(path) -> list[dict]:
    found = json.loads(path.read_text(), parse_constant=refuse_constant)
    Draft202012Validator(SCHEMA).validate(found)
    return found["traceEvents"]


def overlaps(events: list[dict]) -> list[tuple[dict, dict]]:
    """Slices of a thread that overlap without one lying in the other: at most a thousandth of a microsecond is rounding."""
    threads = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            threads[one["pid"], one["tid"]].append(one)
    return [
        (first, second)
        for found in threads.values()
        for first, second in pairwise(sorted(found, key=lambda one: one["ts"]))
        if second["ts"] < first["ts"] + first["dur"] - 0.002
    ]


def spans_line(rank: int, step: int, begin: float) -> str:
    rows = [
        ["phase", "forward", 0.0, 0.04, 0],
        ["cell", "0F0", 0.001, 0.01, 0],
        ["comm", "dp all_reduce", 0.05, 0.02, 4096],
        ["comm", "dp all_reduce", 0.06, 0.02, 4096],
        ["data", "next batch", 0.0, 0.004, 0],
        ["phase", "no number", "x", 0.1, 0],
        ["phase", "negative", 0.0, -1.0, 0],
        "no row",
    ]
    return (
        json.dumps({"t": begin + 0.1, "rank": rank, "kind": "spans", "step": step, "begin": begin, "spans": rows})
        + "\n"
    )


@pytest.fixture
def run(tmp_path) -> Run:
    folder = make_run(tmp_path / "run", ranks=2, steps=50)
    for rank in range(2):
        with (folder / "events" / f"rank-{rank:03d}.jsonl").open("a") as file:
            file.write(spans_line(rank, 20, 1_790_000_000.0 + 1.9))
            if rank == 0:
                saved = {"step": 30, "path": "p", "num_bytes": 5, "stall_seconds": 0.1, "write_seconds": 0.1}
                file.write(json.dumps({"t": 1_790_000_003.05, "kind": "checkpoint_saved", "rank": 0, **saved}) + "\n")
    return Run(folder).look_once()


def predicted(step: int) -> list[dict]:
    return [{"rank": rank, "spans": [["cell", "0F0", 0.0, 0.012, 0]]} for rank in range(2)]


def test_a_run_becomes_a_trace_with_every_step_of_every_rank(run, tmp_path):
    tracks, begin = tracks_of(run, predicted)
    count = write_trace(tmp_path / "t.json", tracks, begin, {"run": "a"})
    events = read_trace(tmp_path / "t.json")
    assert count == len(events) and overlaps(events) == []
    steps = [one for one in events if one["ph"] == "X" and one["cat"] == "steps"]
    assert sorted((one["pid"], one["name"]) for one in steps) == sorted(
        (2 + 2 * rank, f"step {step}") for rank in range(2) for step in range(1, 51)
    )
    for one in steps:
        step = int(one["name"].split()[1])
        assert one["ts"] == pytest.approx(0.1e6 * (step - 1), abs=2) and one["dur"] == pytest.approx(0.1e6, abs=2)
    assert {one["args"]["name"] for one in events if one["name"] == "process_name"} == {
        "run run",
        "rank 0",
        "rank 1",
        "rank 0 as predicted",
        "rank 1 as predicted",
    }
    losses = [one["args"]["value"] for one in events if one["ph"] == "C" and one["name"] == "loss"]
    assert len(losses) == 50 and losses[3] == pytest.approx(3.0)
    (saved,) = [one for one in events if one["ph"] == "i"]
    assert saved["name"] == "checkpoint" and saved["ts"] == pytest.approx(3.05e6) and saved["s"] == "g"


def test_what_is_known_inside_of_a_step_has_lanes_of_its_own(run, tmp_path):
    tracks, begin = tracks_of(run, predicted)
    write_trace(tmp_path / "t.json", tracks, begin, {})
    events = read_trace(tmp_path / "t.json")
    lanes = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    of_first = {lanes[one["pid"], one["tid"]]: one for one in events if one["ph"] == "X" and one["pid"] == 2}
    assert set(of_first) == {"steps", "phase", "cell", "data", "comm dp", "comm dp (2)"}
    assert of_first["comm dp"]["args"] == {"step": 20, "bytes": 4096}
    assert of_first["cell"]["ts"] == pytest.approx(1.901e6, abs=2) and of_first["cell"]["dur"] == pytest.approx(
        1e4, abs=1
    )
    (beside,) = [one for one in events if one["ph"] == "X" and one["pid"] == 3]
    assert (
        beside["name"] == "0F0"
        and beside["ts"] == pytest.approx(1.9e6, abs=2)
        and beside["dur"] == pytest.approx(1.2e4, abs=1)
    )


def test_clocks_of_hosts_are_set_by_the_ends_of_steps():
    ends = {
        0: {1: 10.0, 2: 11.0, 3: 12.0},
        1: {1: 10.1, 2: 11.1, 3: 12.1},
        2: {2: 18.0, 3: 19.0, 4: 20.0},
        3: {1: 1.0, 9: 2.0},
    }
    found = shifts(ends, {0: "a", 1: "a", 2: "b", 3: "c"})
    assert found[0] == found[1] == 0.0, "ranks of one host have one clock"
    assert found[2] == pytest.approx(-6.95) and found[3] == pytest.approx(9.05)
    assert shifts({}, {}) == {} and shifts({0: {1: 5.0}, 1: {2: 7.0}}, {0: "a", 1: "b"}) == {0: 0.0, 1: 0.0}


def test_shifted_ranks_meet_in_the_trace():
    late = Track(
        kind="rank",
        rank=1,
        label="b",
        slices=[Slice(thread_name="steps", name="s", start=108.0, seconds=1.0)],
        shift=-8.0,
    )
    (found,) = [one for one in trace_events([late], 100.0) if one["ph"] == "X"]
    assert found["ts"] == 0.0


def test_what_is_no_number_or_no_text_does_not_get_in(tmp_path):
    track = Track(
        kind="rank",
        rank=0,
        label="a</script>\udcff" + "x" * 1000,
        slices=[
            Slice(
                thread_name="steps", name="\x1b[2J", start=1.0, seconds=1.0, details={"loss": math.nan, "x": object()}
            ),
            Slice(thread_name="steps", name="endless", start=1.0, seconds=math.inf),
            Slice(thread_name="steps", name="never", start=math.nan, seconds=1.0),
            Slice(thread_name="steps", name="backwards", start=5.0, seconds=-1.0),
        ],
        counts=[Count(name="loss", at=1.0, value=math.nan), Count(name="loss", at=math.inf, value=1.0)],
        instants=[Instant(name="x", at=math.nan)],
    )
    write_trace(tmp_path / "t.json", [track], 0.0, {"run": "\udcff"})
    events = read_trace(tmp_path / "t.json")
    assert [one["name"] for one in events if one["ph"] != "M"] == ["\x1b[2J"]
    assert all(len(one["args"].get("name", "")) <= 200 for one in events if one["ph"] == "M")


def test_a_clock_that_goes_back_makes_no_slices_that_overlap(tmp_path):
    folder = make_run(tmp_path / "run", steps=20)
    file = folder / "events" / "rank-000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[11:]:
        line["t"] -= 0.73
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tracks, begin = tracks_of(Run(folder).look_once(), lambda step: [])
    write_trace(tmp_path / "t.json", tracks, begin, {})
    events = read_trace(tmp_path / "t.json")
    assert overlaps(events) == []
    assert sum(one["ph"] == "X" for one in events) == 20


def test_the_check_of_overlaps_can_fail():
    wrong = [{"ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": 2.0} for at in (0.0, 1.0)]
    assert overlaps(wrong)


def test_perfettos_own_reader_finds_every_slice(run, tmp_path):
    shell = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if shell is None:
        pytest.skip("trace_processor_shell is not there; PyPI's package perfetto downloads it when it is used")
    tracks, begin = tracks_of(run, predicted)
    write_trace(tmp_path / "t.json", tracks, begin, {})
    query = tmp_path / "q.sql"
    query.write_text("select count(*) as n from slice where category = 'steps';\n")
    done = subprocess.run([shell, "-q", query, tmp_path / "t.json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "100" in done.stdout, done.stdout + done.stderr
