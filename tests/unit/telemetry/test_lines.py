"""Event lines are strict JSON whatever the numbers, and a torn file is continued on a line of its own."""

import json
from pathlib import Path

from shoal.core.events import Evaluated, Warned
from shoal.telemetry.lines import append_event, encode_event


def test_line() -> None:
    line = encode_event(Warned(message="a\nb"), rank=3, wall_time=12.5)
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"t": 12.5, "rank": 3, "kind": "warning", "message": "a\nb"}


def test_nan_is_valid_json() -> None:
    event = Evaluated(step=1, split="test", loss=float("nan"), accuracy=float("-inf"), samples=1, seconds=0.0)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    fields = json.loads(encode_event(event, rank=0, wall_time=0.0), parse_constant=refuse)
    assert float(fields["loss"]) != float(fields["loss"])
    assert float(fields["accuracy"]) == float("-inf")


def test_torn_line_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "events/supervisor.jsonl"
    assert append_event(path, Warned(message="one"), rank=None)
    with path.open("ab") as file:
        file.write(b'{"t": 1, "ra')
    assert append_event(path, Warned(message="two"), rank=None)
    lines = path.read_text().splitlines()
    assert [json.loads(lines[index])["message"] for index in (0, 2)] == ["one", "two"]
    assert json.loads(lines[0])["rank"] is None


def test_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    assert not append_event(tmp_path / "events/supervisor.jsonl", Warned(message="one"), rank=None)
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    assert not append_event(full, Warned(message="one"), rank=None)
