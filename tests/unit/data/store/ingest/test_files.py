"""New files of a folder are taken in once each, whole, when they have stopped changing."""

import os

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.formats.options import ReadOptions, Rejects
from shoal.data.store.ingest.files import FolderArrivals, Seen, Unchanged, first_bytes, pause_of, settled, watched
from shoal.data.store.ingest.loop import take_in
from shoal.data.store.reader import open_store
from shoal.data.store.writer import BuildOptions


def test_a_file_is_ready_when_it_has_been_alike_for_so_long():
    files = watched({"a": Seen(1, "x"), "b": Seen(1, "x"), "c": Seen(1, "x")}, {}, 5.0)
    assert settled(files, 5.3, 0.4) == [] and settled(files, 5.4, 0.4) == ["a", "b", "c"]
    now = {"c": Seen(1, "x"), "b": Seen(2, "x"), "a": Seen(1, "y"), "d": Seen(1, "x")}
    files = watched(now, files, 5.3)
    assert settled(files, 5.4, 0.4) == ["c"] and settled(files, 5.71, 0.4) == ["a", "b", "c", "d"]


def test_looks_are_several_in_the_time_that_a_file_waits_and_a_part_of_a_processor():
    waiting = {"a": Unchanged(Seen(1, "x"), 5.0)}
    assert pause_of({}, 5.0, 0.4, 0.001) == pytest.approx(0.1) and pause_of({}, 5.0, 0.4, 0.05) == pytest.approx(0.2)
    assert pause_of({}, 5.0, 0.4, 3.0) == pytest.approx(0.4)
    assert pause_of(waiting, 5.35, 0.4, 0.001) == pytest.approx(0.05), "not longer than the file has to wait"
    assert pause_of(waiting, 5.5, 0.4, 0.001) == 0.0
    sizes = {"a": 5, "b": 5, "c": 1}
    assert first_bytes(["a", "b", "c"], sizes, 10) == ["a", "b"] and first_bytes(["a", "b"], sizes, 1) == ["a"]


def follow(folder, store, *, steps=(), warn=None, **options):
    """Take in what is there, doing one step after each version; the versions that were told."""
    told, left = [], list(steps)

    def on_version(made, what):
        told.append((made.version, made.num_rows, what.rpartition("/")[2]))
        if left:
            left.pop(0)()

    arrivals = FolderArrivals(str(folder), options=ReadOptions(**options), warn=warn)
    take_in(
        arrivals,
        str(store),
        options=BuildOptions(),
        every_s=0.01,
        idle_s=0.2,
        is_over=lambda: False,
        on_version=on_version,
    )
    return told


def write(folder, name, first, count, kind=float):
    lines = "".join(f"{kind(number)}\n" for number in range(first, first + count))
    (folder / f".{name}").write_text("x\n" + lines)
    os.replace(folder / f".{name}", folder / name)


def test_what_arrives_is_in_the_store_once_whoever_looks(tmp_path):
    folder, store = tmp_path / "in", tmp_path / "store"
    folder.mkdir()
    write(folder, "1.csv", 0, 10)
    (folder / ".2.csv").write_text("x\nhalf a ro")
    told = follow(folder, store, steps=[lambda: write(folder, "0.csv", 10, 5, int)])
    # A later file may have an earlier name, and numbers that happen to be whole.
    assert told == [(1, 10, "1.csv"), (2, 15, "0.csv")]
    assert follow(folder, store) == [], "a second watcher finds nothing new"
    write(folder, "3.csv", 15, 5)
    write(folder, "4.csv", 20, 5)
    assert follow(folder, store) == [(3, 25, "3.csv and 1 more files")]
    assert open_store(str(store)).read(np.arange(25))["x"].values.tolist() == list(range(25))


def test_what_does_not_fit_is_named_or_kept_apart_and_nothing_of_it_is_in(tmp_path):
    folder, store, rejects = tmp_path / "in", tmp_path / "store", tmp_path / "rejects.jsonl"
    folder.mkdir()
    write(folder, "1.csv", 0, 10)
    follow(folder, store)
    (folder / "2.csv").write_text("x\n1\nmuch\n3\n")
    with pytest.raises(RequestError, match=r"2\.csv, row 2, column 'x'"):
        follow(folder, store)
    assert len(open_store(str(store))) == 10
    kept = Rejects(rejects, is_appended=True)
    assert follow(folder, store, rejects=kept) == [(2, 12, "2.csv")]
    (folder / "3.csv").write_text("x\nmore\n")
    assert follow(folder, store, rejects=kept) == [(3, 12, "3.csv")], "how far it goes is kept where no row was good"
    assert [line.split('"why"')[0].count("row") for line in rejects.read_text().splitlines()] == [1, 1]
    (folder / "4.csv").write_text("y\n1\n")
    with pytest.raises(RequestError, match="column 'x' is in the store and not in"):
        follow(folder, store)


def test_a_file_that_changes_after_it_was_taken_in_is_told_once(tmp_path):
    folder, store, warnings = tmp_path / "in", tmp_path / "store", []
    folder.mkdir()
    write(folder, "1.csv", 0, 10)
    follow(folder, store)
    with (folder / "1.csv").open("a") as file:
        file.write("11\n")
    follow(folder, store, warn=warnings.append)
    assert len(open_store(str(store))) == 10
    assert len(warnings) == 1 and "write new rows into new files" in warnings[0]


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RequestError, match="nobody is no folder"):
        FolderArrivals(str(tmp_path / "nobody"))
