"""Runs are found below a folder, come and go, and have ids that are no paths."""

import os
import shutil

import msgspec

from shoal.dashboard.runs.folder import RunFolder
from shoal.dashboard.views.overview import run_row
from support.dashboard.synthetic import make_run


def names(folder):
    folder.look(all_runs=True)
    return sorted(run.name for run in folder.runs.values())


def test_runs_lie_one_two_or_three_levels_below(tmp_path):
    for name in ("a", "b/c", "b/d/e", "b/d/f/too-deep"):
        make_run(tmp_path / name, steps=1)
    (tmp_path / "empty" / "folder").mkdir(parents=True)
    assert names(RunFolder(tmp_path)) == ["a", "b/c", "b/d/e"]


def test_a_run_itself_is_a_folder_of_one(tmp_path):
    assert names(RunFolder(make_run(tmp_path / "a", steps=1))) == ["a"]


def test_runs_come_and_go(tmp_path):
    folder = RunFolder(tmp_path / "runs")
    assert names(folder) == []
    make_run(tmp_path / "runs" / "a", steps=1)
    assert names(folder) == ["a"]
    (gone,) = folder.runs
    shutil.rmtree(tmp_path / "runs" / "a")
    assert names(folder) == [] and folder.gone == [gone]


def test_an_id_is_no_path_and_stays(tmp_path):
    make_run(tmp_path / "<script>alert(1)</script>", steps=1)
    one, other = RunFolder(tmp_path), RunFolder(tmp_path)
    one.look(all_runs=True)
    other.look(all_runs=True)
    (known,) = one.runs
    assert list(other.runs) == [known] and known.isalnum() and len(known) == 16


def test_links_are_not_followed(tmp_path):
    make_run(tmp_path / "outside" / "secret", steps=1)
    make_run(tmp_path / "runs" / "a", steps=1)
    os.symlink(tmp_path / "outside" / "secret", tmp_path / "runs" / "out")
    os.symlink(tmp_path / "runs", tmp_path / "runs" / "round-and-round")
    os.symlink(tmp_path / "runs" / "a", tmp_path / "runs" / "alias")
    folder = RunFolder(tmp_path / "runs")
    assert names(folder) == ["a"]
    assert set(folder.skipped) == {"out", "round-and-round", "alias"}


def test_runs_that_were_read_are_there_before_the_others(tmp_path):
    for name in ("a", "b", "c"):
        make_run(tmp_path / name, steps=1)
    folder = RunFolder(tmp_path)
    seen = []
    folder.look(after_run=lambda: seen.append([run.name for run in folder.read_runs]))
    assert seen == [["a"], ["a", "b"], ["a", "b", "c"]]


def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(tmp_path):
    run = tmp_path / os.fsdecode(b"caf\xe9-\xff")
    make_run(run, steps=1)
    folder = RunFolder(tmp_path)
    folder.look()
    (found,) = folder.runs.values()
    row = run_row(found, 1_790_000_000.0)
    assert row["name"] == "caf-" and row["step"] == 1
    assert b"caf-" in msgspec.json.encode(row)
