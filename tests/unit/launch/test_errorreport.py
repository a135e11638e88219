"""Error reports survive the trip over the disk, and nothing that lies there can mislead or break the reader."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import RequestError, RunError
from shoal.launch.errorreport import ErrorReport, clear_reports, read_report, write_report


def raise_and_report(error: Exception) -> ErrorReport:
    def deep_inside() -> None:
        raise error

    try:
        deep_inside()
    except Exception as raised:
        return ErrorReport.of(raised, rank=1, step=7, phase="forward", peer_failure=False)
    raise AssertionError


def test_round_trip(tmp_path: Path) -> None:
    report = raise_and_report(ValueError("bad \ud800 ümlaut".encode(errors="replace").decode()))
    assert report.type == "ValueError"
    assert "deep_inside" in report.traceback
    assert abs(report.time - time.time()) < 60
    write_report(tmp_path, report)
    assert read_report(tmp_path, 1) == report
    assert read_report(tmp_path, 0) is None
    assert [path.name for path in (tmp_path / "errors").iterdir()] == ["rank-001.json"]


def test_kind_of_exit() -> None:
    assert raise_and_report(RequestError("x")).exit == "request"
    report = raise_and_report(RunError("x"))
    assert (report.exit, report.type) == ("run", "shoal.core.errors.RunError")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"rank": 1, "step": "seven"}', "\x00\xff"])
def test_unreadable_report_is_no_report(tmp_path: Path, text: str) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors/rank-001.json").write_text(text)
    assert read_report(tmp_path, 1) is None


@pytest.mark.parametrize(
    ("field", "value"), [("message", 5), ("time", "now"), ("peer_failure", "no"), ("traceback", None)]
)
def test_report_with_a_wrong_field_is_no_report(tmp_path: Path, field: str, value: Any) -> None:
    write_report(tmp_path, raise_and_report(ValueError("x")))
    path = tmp_path / "errors/rank-001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert read_report(tmp_path, 1) is None


def test_clear(tmp_path: Path) -> None:
    clear_reports(tmp_path)
    write_report(tmp_path, raise_and_report(ValueError("x")))
    clear_reports(tmp_path)
    assert read_report(tmp_path, 1) is None
