"""``shoal schedule`` as a user runs it: drawings, files, refusals, and how soon it answers."""

import json
import os
import pty
import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from shoal.schedules.catalogue import FAMILIES, make_schedule
from shoal.schedules.csv_file import MOST_BYTES, MOST_CELLS
from shoal.schedules.draw import draw_svg
from shoal.schedules.pricing import price

ANSWER_SECONDS = 0.5
SIZE = ("--pp", 2, "--microbatches", 2)
CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"

LOADED = """
import sys
from shoal.cli.main import main
sys.argv[0] = "shoal"
try:
    main()
finally:
    print(sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def test_the_drawing_the_bubble_and_what_each_rank_holds(shoal):
    done = shoal("schedule", "1f1b", *SIZE)
    assert (done.returncode, done.stderr) == (0, "")
    drawing, bubble, table = done.stdout.split("\n\n")
    assert drawing.splitlines() == ["rank  0  0F0 0F1         0B0         0B1", "rank  1      1F0 1B0     1F1 1B1"]
    assert bubble.startswith("1f1b: 33.3% idle in 9, ") and "2 ranks, 2 stages, 2 microbatches" in bubble
    rows = [line.split() for line in table.splitlines()]
    assert rows == [
        ["rank", "stages", "peak", "activations", "versions", "busy", "idle"],
        ["0", "0", "2", "1", "6", "3"],
        ["1", "1", "1", "1", "6", "3"],
    ]


def test_costs_change_the_times(shoal):
    costs = ("--forward", 2, "--input", 3, "--weight", 1, "--transfer", 0.5)
    result = json.loads(shoal("schedule", "1f1b", *SIZE, "--format", "json", *costs).stdout)
    # Two microbatches and one other rank, six units each; and on the longest way a transfer there and one back.
    assert result["makespan"] == pytest.approx(3 * 6 + 2 * 0.5)
    assert result["costs"]["input"] == 3


def test_stages_of_several_ranks_take_turns_at_as_many_times_the_work(shoal, tmp_path):
    done = shoal("schedule", "1f1b", "--replicas", "2-1", "--microbatches", 2)
    assert (done.returncode, done.stderr) == (0, "")
    drawing, bubble, _ = done.stdout.split("\n\n")
    assert drawing.splitlines() == [
        "rank  0  0F0                 0B0",
        "rank  1  0F1                             0B1",
        "rank  2          1F0 1B0     1F1 1B1",
    ]
    assert bubble.startswith("1f1b: 50.0% idle in 12, ") and "3 ranks, 2 stages, 2 microbatches" in bubble
    written = shoal("schedule", "1f1b", "--replicas", "2-1", "--microbatches", 2, "--format", "csv").stdout
    (tmp_path / "turns.csv").write_text(written)
    read = json.loads(shoal("schedule", "turns.csv", "--replicas", "2-1", "--format", "json").stdout)
    assert (read["makespan"], read["replicas"], read["costs"]["stages"]) == (12, [2, 1], [2, 1])


def test_an_overlap_may_cost_less_than_its_parts(shoal):
    arguments = ("schedule", "dualpipev", "--pp", 2, "--microbatches", 8, "--format", "json")
    whole, overlapped = (json.loads(shoal(*arguments, *more).stdout) for more in ((), ("--overlapped", 2)))
    assert overlapped["makespan"] < whole["makespan"]


def test_csv_svg_and_json_stand_alone_on_stdout(shoal, tmp_path):
    written = {form: shoal("schedule", "1f1b", *SIZE, "--format", form).stdout for form in ("csv", "svg", "json")}
    assert written["csv"] == CSV
    assert xml.fromstring(written["svg"]).tag.endswith("svg")
    assert json.loads(written["json"])["per_rank"][0]["peak_activations"] == 2


def test_the_json_file_has_what_the_format_has(shoal, tmp_path):
    done = shoal("schedule", "zbv", "--pp", 2, "--microbatches", 4, "--format", "json", "--json", "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(done.stdout)


def test_a_file_of_ones_own_is_read_and_its_numbers_may_be_said_again(shoal, tmp_path):
    (tmp_path / "mine.csv").write_text(CSV)
    done = shoal("schedule", "mine.csv", *SIZE, "--chunks", 1)
    assert done.returncode == 0 and "mine: 33.3% idle" in done.stdout
    assert shoal("schedule", "mine.csv", "--format", "csv").stdout == CSV


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_drawn_and_its_csv_read_back(shoal, tmp_path, name):
    written = shoal("schedule", name, "--pp", 4, "--microbatches", 8, "--format", "csv")
    assert (written.returncode, written.stderr) == (0, "")
    (tmp_path / "again.csv").write_text(written.stdout)
    assert shoal("schedule", "again.csv", "--format", "csv").stdout == written.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1fb1", *SIZE), ["there is no schedule '1fb1'", "did you mean '1f1b'?"]),
        (("xyzzy", *SIZE), ["there is no schedule 'xyzzy'", *FAMILIES]),
        (("1f1b",), ["1f1b needs --pp and --microbatches", "--pp 4 --microbatches 8"]),
        (("1f1b", "--pp", 3), ["1f1b needs --microbatches", "--pp 3"]),
        (("1f1b", "--pp", 0, "--microbatches", 2), ["pp is 0, and must be at least 1"]),
        (("1f1b", *SIZE, "--chunks", 2), ["1 stage(s) per rank, and 2 are asked for", "leave chunks out"]),
        (("1f1b", "--pp", 1000, "--microbatches", 1000), ["1000000 cells", "100000", "ask for fewer"]),
        (("1f1b", *SIZE, "--forward", -1), ["the cost of forward is -1", "not negative"]),
        (("1f1b", *SIZE, "--overlapped", "nan"), ["the cost of overlapped is nan"]),
        (("1f1b", *SIZE, "--transfer", 1e308), ["the cost of transfer is 1e+308", "1e-300 to 1e+300"]),
        (("1f1b", *SIZE, "--input", 1e-320), ["the cost of input is ", "1e-300 to 1e+300"]),
        (("GPipe", *SIZE), ["did you mean 'gpipe'?"]),
        (("1f1b", *SIZE, "--format", "png"), ["'png' is not one of", "svg"]),
        (("1f1b", "--pp", "two", "--microbatches", 2), ["--pp", "integer"]),
        (("1f1b", *SIZE, "--format", "svg", "--json", "-"), ["--format svg and --json - both write to stdout"]),
        (("1f1b", *SIZE, "--json", "no/such.json"), ["there is no folder no"]),
        (("mine.csv", "--pp", 3), ["--pp is 3, and mine.csv has 2", "leave --pp out"]),
        (("mine.csv", "--microbatches", 4), ["--microbatches is 4, and mine.csv has 2"]),
        (("mine.csv", "--chunks", 2), ["--chunks is 2, and mine.csv has 1"]),
        (("mine.csv", "--replicas", "2-1"), ["--replicas is 2-1, and mine.csv has 1-1"]),
        (("1f1b", *SIZE, "--replicas", "2-1"), ["replicas=2-1 are 3 ranks, and pp is 2"]),
        (("1f1b", "--microbatches", 2, "--replicas", "2,1"), ["replicas=2,1 is no row of numbers"]),
        (
            ("1f1b", "--microbatches", 2, "--replicas", "3-1"),
            ["3 ranks that take turns, and 2 microbatches are too few"],
        ),
        (("zbv", "--microbatches", 2, "--replicas", "2-1"), ["no stages of several ranks", "gpipe, 1f1b"]),
        (("gone.csv",), ["cannot read gone.csv", "No such file"]),
        (("folder.csv",), ["cannot read folder.csv", "directory"]),
        (("bytes.csv",), ["bytes.csv is not text in UTF-8", "byte 0"]),
        (("empty.csv",), ["empty.csv has no cells"]),
        (("wrong.csv",), ["wrong.csv, row 1 (rank 0), cell 2: 'x' is no action"]),
        (("cycle.csv",), ["cycle.csv: it never ends", "^ here"]),
    ],
)
def test_a_wrong_request_is_exit_2_with_the_fix_and_nothing_on_stdout(shoal, tmp_path, arguments, words):
    (tmp_path / "mine.csv").write_text(CSV)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "wrong.csv").write_text("0F0,x\n")
    (tmp_path / "cycle.csv").write_text("0B0,0F0\n")
    done = shoal("schedule", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_help_lists_the_families(shoal):
    families = shoal("schedule", "--help").stdout.partition("Families:")[2]
    assert re.findall(r"^  (\S+)  ", families, re.MULTILINE) == list(FAMILIES)


def on_a_terminal(tmp_path, columns: int, **environment: str) -> str:
    """What ``shoal schedule`` writes when its stdout is a terminal of this width."""
    above, below = pty.openpty()
    try:
        command = [Path(sys.executable).parent / "shoal", "schedule", "1f1b", "--pp", "2", "--microbatches", "8"]
        kept = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        variables = {**kept, "COLUMNS": str(columns), "TERM": "xterm", **environment}
        subprocess.run(command, stdout=below, env=variables, cwd=tmp_path, check=True, timeout=60)
        return os.read(above, 100_000).decode().replace("\r\n", "\n")
    finally:
        os.close(above)
        os.close(below)


def test_a_terminal_gets_colours_and_lines_that_fit(tmp_path):
    drawing = on_a_terminal(tmp_path, 60).partition("1f1b:")[0]
    assert "\033[104;30m0F0" in drawing
    plain = re.sub(r"\033\[[\d;]*m", "", drawing)
    assert plain.startswith("time 0 to ") and max(map(len, plain.splitlines())) <= 60


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_escape_codes_where_none_are_wanted_or_understood(tmp_path, environment):
    drawing = on_a_terminal(tmp_path, 60, **environment)
    assert "0F0" in drawing and "\033" not in drawing


def test_json_on_stdout_is_alone_there(shoal, tmp_path):
    done = shoal("schedule", "1f1b", *SIZE, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shoal("schedule", "1f1b", *SIZE, "--format", "json").stdout
    assert list(tmp_path.iterdir()) == []


# A drawing and its table are two writes; what is written at once is still in the buffer when the verb is done.
@pytest.mark.parametrize("form", ["text", "csv", "json"])
def test_a_reader_that_has_gone_ends_it_quietly(form):
    size = ["--pp", "2", "--microbatches", "2", "--format", form]
    command = [Path(sys.executable).parent / "shoal", "schedule", "1f1b", *size]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_stdout_that_was_closed_is_no_error():
    command = f"exec '{Path(sys.executable).parent / 'shoal'}' schedule 1f1b --pp 2 --microbatches 2 >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_of_each_is_not_several(shoal):
    assert (
        shoal("schedule", "1f1b", "--pp", 1, "--microbatches", 1).stdout.count("; 1 rank, 1 stage, 1 microbatch\n") == 1
    )
    assert ": 1 rank, 1 stage, 1 microbatch, " in draw_one()


def draw_one() -> str:
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    return draw_svg(schedule, price(schedule))


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_file_of_too_many_bytes_is_refused_before_it_is_read(shoal, tmp_path, kind):
    huge = tmp_path / "huge.csv"
    with huge.open("wb") as file:
        file.truncate(3 * MOST_BYTES)
    found = 3 * MOST_BYTES
    if kind == "pipe":
        os.mkfifo(tmp_path / "pipe.csv")
        feeder = subprocess.Popen(
            ["dd", "if=huge.csv", "of=pipe.csv", "bs=1M"], cwd=tmp_path, stderr=subprocess.DEVNULL
        )
        found = MOST_BYTES + 1
    done = shoal("schedule", f"{'huge' if kind == 'file' else 'pipe'}.csv")
    if kind == "pipe":
        feeder.wait(60)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"has {found} bytes or more, and at most {MOST_BYTES} are read" in done.stderr


def test_a_file_of_too_many_cells_is_refused_with_both_numbers(shoal, tmp_path):
    (tmp_path / "long.csv").write_text("0F0,0B0" + "," * MOST_CELLS)
    done = shoal("schedule", "long.csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"long.csv has about {MOST_CELLS + 2} cells, and at most {MOST_CELLS} are read" in done.stderr


@pytest.mark.parametrize("form", ["csv", "svg", "json"])
def test_nothing_heavy_is_loaded(form):
    command = [sys.executable, "-c", LOADED, "schedule", "zbv", "--pp", "4", "--microbatches", "8", "--format", form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(re.findall(r"'(\w+)'", done.stderr))
    assert {"shoal", "typer"} <= loaded
    assert loaded.isdisjoint({"torch", "numpy", "pydantic", "rich"})


def test_it_answers_in_time(shoal):
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert shoal("schedule", "zbv", "--pp", 8, "--microbatches", 32).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Time on the processor: one thread that waits for nothing, however busy the machine is with other things.
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < ANSWER_SECONDS, seconds


def test_the_guide_has_the_line_of_every_family():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "schedules.md").read_text()
    lines = re.findall(r"^\| `([\w-]+)` \| (.+?) \| (.+) \|$", guide, re.MULTILINE)
    assert lines == [(family.name, family.summary, family.source) for family in FAMILIES.values()]
