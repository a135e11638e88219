"""``shoal predict`` as a command: its table, the JSON that programs read, and one message for what is no table."""

import json

import pytest

from shoal.planner.tables.table import COLUMNS
from support.planner.run_tables import write_table

pytestmark = pytest.mark.timeout(240)


def test_the_json_that_programs_read(shoal, tmp_path):
    rows = [
        {},
        {"layers": ""},
        {"source": "another", "measured_value": 2.5},
        {"measured_metric": "oom", "measured_value": 0},
    ]
    write_table(tmp_path / "runs.csv", *rows)
    done = shoal("predict", "runs.csv", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert {"rows", "sources"} <= set(found) and list(found["sources"]) == ["somebody with Megatron", "another"]
    assert [row["row"] for row in found["rows"]] == [0, 1, 2, 3]
    for row in found["rows"]:
        assert {"row", "metric", "measured", "predicted", "in_range"} <= set(row) and type(row["in_range"]) is bool
    first, unread, other, memory = found["rows"]
    assert (first["metric"], first["measured"], first["in_range"]) == ("iter_time_s", 3.1, True)
    assert first["predicted"] == other["predicted"] > 0 and memory["predicted"] == 0.0
    assert unread["predicted"] is None and unread["measured"] == 3.1 and unread["in_range"] is False
    assert "layers is missing" in unread["note"]
    figures = found["sources"]["another"]
    assert figures["count"] == 1 and figures["mape"] == pytest.approx(abs(other["predicted"] / 2.5 - 1))
    assert {"p90", "bias", "kendall_tau", "regret", "oom_precision", "oom_recall"} <= set(figures)
    assert "1 row(s), the first is row 1, counted from 0, line 3 of runs.csv: layers is missing" in done.stdout
    assert "MAPE" in done.stdout and "another" in done.stdout


def test_what_was_not_measured_is_shown_and_what_is_wrong_is_said_by_line(shoal, tmp_path):
    """Of a table without measurements nothing was shown but an empty table of errors."""
    blank = {"measured_value": ""}
    write_table(tmp_path / "runs.csv", *[blank] * 11, {**blank, "measured_metric": "oom"}, {**blank, "zero": 9})
    done = shoal("predict", "runs.csv", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert "MAPE" not in done.stdout and "predicted and not measured: 12 row(s)" in done.stdout
    shown = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [line[:2] for line in shown] == [[str(row), str(row + 2)] for row in range(10)]
    assert {line[4] for line in shown} == {
        f"{found[0]['predicted']:.4g}"
    } and "and 2 more; out.json has them" in done.stdout
    said = "zero is '9'; it may be 0, 1, 2, 3, or blank where it is not known"
    assert f"not predicted: 1 row(s), the first is row 12, counted from 0, line 14 of runs.csv: {said}" in done.stdout
    assert found[12]["predicted"] is None and found[12]["line"] == 14 and found[12]["note"] == f"line 14: {said}"


def test_many_reasons_are_cut_short(shoal, tmp_path):
    rows = [{"zero": 4 + number} for number in range(12)]
    write_table(tmp_path / "runs.csv", {"measured_metric": "oom", "measured_value": ""}, *rows)
    done = shoal("predict", "runs.csv")
    assert done.returncode == 0 and done.stdout.count("not predicted: ") == 10, done.stderr
    assert "and 2 more reasons; --json FILE has them" in done.stdout and " no " in done.stdout


def test_json_alone_on_stdout(shoal, tmp_path):
    write_table(tmp_path / "runs.csv", {}, {"heads": "0"})
    done = shoal("predict", "runs.csv", "--json", "-")
    assert done.returncode == 0 and len(json.loads(done.stdout)["rows"]) == 2 and "MAPE" in done.stderr


def test_nothing_that_can_be_predicted_is_a_failure_that_says_why(shoal, tmp_path):
    write_table(tmp_path / "runs.csv", {"gpu": "abacus"})
    done = shoal("predict", "runs.csv", "--json", "out.json")
    assert done.returncode == 1 and "there is no device 'abacus'" in done.stdout
    assert "none of the 1 row(s) of runs.csv could be predicted" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["predicted"] is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.csv", None, "cannot read absent.csv: No such file or directory"),
        (".", None, "cannot read .: Is a directory"),
        ("empty.csv", b"", "empty.csv is empty; a table of runs begins with a line of columns"),
        ("header.csv", ",".join(COLUMNS).encode() + b"\n", "header.csv has no rows"),
        ("lean.csv", ",".join(COLUMNS[1:]).encode() + b"\n", "and source is not among them"),
        ("semicolons.csv", ";".join(COLUMNS).encode() + b"\n", "has its columns separated by ';'"),
        ("picture.csv", b"\x89PNG\r\n\xff\x00", "picture.csv is not a CSV file in UTF-8"),
    ],
)
def test_what_is_no_table_gets_one_message(shoal, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = shoal("predict", name, "--json", "out.json")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and not (tmp_path / "out.json").exists()
