"""The cache of columns: as good as reading, never believed blindly, never in the run, and bounded."""

import os
import time

import numpy as np
import pytest

from shoal.dashboard.runs.cache import ColumnCache
from shoal.dashboard.runs.run import Run
from support.dashboard.synthetic import make_run, step_line


@pytest.fixture
def cache(tmp_path):
    return ColumnCache(tmp_path / "cache")


@pytest.fixture
def path(tmp_path):
    made = make_run(tmp_path / "one", steps=2000)
    with (made / "events" / "rank-000.jsonl").open("a") as file:
        file.write('{"t": 1.0, "kind": "warning", "message": "careful"}\nbroken\n')
        file.write('{"t": 1.0, "kind": "spans", "step": 7, "begin": 0, "spans": []}\n{"t": 1.0, "kind": "new"}\n')
        file.write('{"t": 1.0, "kind": "log", "step": 3, "values": {"mine": 4.5}}\n')
    return made


def forbid_reading(monkeypatch):
    def refuse(*given):
        raise AssertionError("it was read again")

    monkeypatch.setattr("shoal.dashboard.runs.files.os.pread", refuse)


def test_a_cache_is_as_good_as_reading(path, cache, monkeypatch):
    read = Run(path, cache=cache).look_once()
    with monkeypatch.context() as patched:
        forbid_reading(patched)
        again = Run(path, cache=cache).look_once()
    for one, other in zip(read.ranks, again.ranks, strict=True):
        assert one.steps.names == other.steps.names
        for name in one.steps.names:
            assert np.array_equal(one.steps.column(name), other.steps.column(name), equal_nan=True)
        assert one.spans == other.spans and one.events() == other.events()
    assert again.broken_lines == read.broken_lines == 1
    assert again.unknown_kinds == read.unknown_kinds and again.unknown_kinds["new"] == 1
    assert again.curve("log:mine").pyramid.values.tolist() == [4.5]


def test_what_grew_since_is_added(path, cache):
    Run(path, cache=cache).look_once()
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.write(step_line(2001, 0, t=1.0, loss=0.125))
    again = Run(path, cache=cache).look_once()
    assert again.curve("loss").pyramid.values[-1] == 0.125
    assert len(again.curve("loss").pyramid.values) == 2001


def test_a_run_that_grows_is_written_a_few_times_and_its_tables_stay(path, cache, monkeypatch):
    """All writings together are proportional to what there is in the end, and who has a table or a curve of it keeps it."""
    seconds, written = [0.0], []
    replace = os.replace
    monkeypatch.setattr(
        "shoal.dashboard.runs.cache.os.replace",
        lambda one, other: written.append(one.stat().st_size) or replace(one, other),
    )
    monkeypatch.setattr("shoal.dashboard.runs.cache._WORTH_BYTES", 10_000)
    monkeypatch.setattr("shoal.dashboard.runs.cache._MAPPED_BYTES", 1)
    run = Run(path, cache=cache, clock=lambda: seconds[0]).look_once()
    steps = run.lead().steps
    for look in range(100):
        with (path / "events" / "rank-000.jsonl").open("a") as file:
            file.writelines(step_line(2001 + 100 * look + step, 0, t=1.0, loss=0.5) for step in range(100))
        run.look_once()
    assert len(written) < 8 and sum(written) < 4 * written[-1]
    assert (
        run.lead().steps is steps and steps.rows == 12_000 and steps.column("step").tolist() == list(range(1, 12_001))
    )
    before = len(written)
    for _ in range(3):
        seconds[0] += 30
        run.look_once()
    # At rest, all of it once.
    assert len(written) == before + 1
    again = Run(path, cache=cache)
    forbid_reading(monkeypatch)
    assert again.look_once().lead().steps.rows == 12_000


def test_nothing_is_written_into_the_run(path, cache):
    before = {file: file.stat().st_mtime_ns for file in [path, *path.rglob("*")]}
    Run(path, cache=cache).look_once()
    assert {file: file.stat().st_mtime_ns for file in [path, *path.rglob("*")]} == before
    (kept,) = cache.folder.iterdir()
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "magic"])
def test_a_cache_that_was_altered_is_not_believed(path, cache, harm):
    Run(path, cache=cache).look_once()
    (kept,) = cache.folder.iterdir()
    data = bytearray(kept.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
    kept.write_bytes({"cut": data[:-9], "empty": b"", "magic": b"x" * len(data)}.get(harm, data))
    read = Run(path).look_once()
    again = Run(path, cache=ColumnCache(cache.folder)).look_once()
    assert np.array_equal(again.curve("loss").pyramid.values, read.curve("loss").pyramid.values)


def test_a_cache_of_another_file_is_not_used(path, cache):
    Run(path, cache=cache).look_once()
    events = path / "events" / "rank-000.jsonl"
    # In place, so that device and inode are the same, and longer.
    events.write_text("".join(step_line(step, 0, t=float(step), loss=0.5) for step in range(1, 5000)))
    again = Run(path, cache=ColumnCache(cache.folder)).look_once()
    assert set(again.curve("loss").pyramid.values) == {0.5}


def test_the_longest_unused_go_first(tmp_path):
    cache = ColumnCache(tmp_path / "cache", most_bytes=500_000)
    for number in range(4):
        Run(make_run(tmp_path / f"run-{number}", steps=2000), cache=cache).look_once()
        for kept in cache.folder.iterdir():
            os.utime(
                kept, (time.time() - 100 * (10 - number),) * 2
            ) if kept.stat().st_mtime > time.time() - 50 else None
    assert 0 < sum(kept.stat().st_size for kept in cache.folder.iterdir()) <= 500_000
    assert Run(tmp_path / "run-3", cache=cache).look_once().broken_lines == 0


def test_a_folder_that_cannot_be_written_is_no_failure(path, tmp_path):
    (tmp_path / "file").write_text("")
    assert Run(path, cache=ColumnCache(tmp_path / "file" / "cache")).look_once().curve("loss") is not None


def test_a_number_of_more_than_64_bits_is_only_not_kept(path, cache):
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.write('{"t": 1.0, "kind": "warning", "message": "x", "more": 123456789012345678901234567890}\n')
    assert Run(path, cache=cache).look_once().events("warning")[1]["more"] == 123456789012345678901234567890
    assert list(cache.folder.iterdir()) == []
