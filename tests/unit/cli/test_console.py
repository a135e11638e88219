import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.cli.console import check_result_file, print_table, write_result
from shoal.core.errors import RequestError, RunError


@dataclass(frozen=True)
class Point:
    x: float
    where: Path


def test_values_become_json(tmp_path):
    file = tmp_path / "result.json"
    write_result(file, {"point": Point(x=math.nan, where=Path("a/b")), "list": (1, 2.5, None, math.inf), 3: True})
    assert json.loads(file.read_text()) == {
        "point": {"x": None, "where": "a/b"},
        "list": [1, 2.5, None, None],
        "3": True,
    }


def test_an_older_result_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    file = tmp_path / "result.json"
    file.write_text("old" * 1000)
    held = file.open()
    write_result(file, [1])
    # Whoever had the old file open still reads all of the old one: it was replaced, not written into.
    assert held.read() == "old" * 1000
    held.close()
    assert json.loads(file.read_text()) == [1] and os.listdir(tmp_path) == ["result.json"]


def test_no_file_is_nothing_to_do(tmp_path):
    write_result(None, {"a": 1})
    check_result_file(None)
    assert os.listdir(tmp_path) == []


def test_a_value_that_is_no_json_leaves_no_file(tmp_path):
    with pytest.raises(TypeError):
        write_result(tmp_path / "result.json", {"a": object()})
    assert os.listdir(tmp_path) == []


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_result(pipe, {"a": 1})
    reader.join(10)
    assert json.loads(read[0]) == {"a": 1} and pipe.is_fifo()


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    with pytest.raises(RequestError, match="is a folder"):
        check_result_file(tmp_path)
    with pytest.raises(RequestError, match="no folder"):
        check_result_file(tmp_path / "gone" / "result.json")
    check_result_file(tmp_path / "result.json")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_refuses_is_a_failure_with_the_name(tmp_path):
    with pytest.raises(RunError, match=r"gone/result\.json"):
        write_result(tmp_path / "gone" / "result.json", 1)


def test_a_table_outside_a_terminal_has_one_line_per_row(capsys):
    print_table(("name", "value"), [("a", "long " * 100), ("[red]b", 2)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["name", "value"]
    assert lines[2].split() == ["[red]b", "2"]


def test_a_link_is_written_through_and_stays_a_link(tmp_path):
    """``--json /dev/stdout`` with stdout in a file, run by root, put a file in the place of the system's link."""
    (tmp_path / "file").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("file")
    check_result_file(link)
    write_result(link, [1])
    assert link.is_symlink() and json.loads((tmp_path / "file").read_text()) == [1]
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
