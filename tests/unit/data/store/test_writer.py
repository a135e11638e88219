"""Stores are the same whatever built them, grow by versions that change nothing of those before, and take nothing in twice."""

import itertools
import threading

import numpy as np
import pytest

from shoal.core.errors import RequestError, RunError
from shoal.data.receipt import hash_rows
from shoal.data.storage.memory import MemoryStorage
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.building.units import Unit
from shoal.data.store.checks.whole import verify_store
from shoal.data.store.folder import StoreFolder
from shoal.data.store.reader import newest_version, open_store
from shoal.data.store.writer import BuildOptions, append_store, build_store
from shoal.data.table import Table, concat_tables, number_column
from support.data.tables import assert_same, make_table

SMALL = BlockOptions(target_bytes=1 << 14)


def make_units(count=5, rows=300):
    return [
        Unit(name=f"unit {n}", open=lambda n=n: [make_table(rows, first=n * rows)], fingerprint=str(n))
        for n in range(count)
    ]


def options(**changes):
    return BuildOptions(block=SMALL, key="id", **changes)


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_any_number_of_processes_writes_the_same_files(tmp_path):
    made = [build_store(make_units(), str(tmp_path / str(n)), options=options(workers=n)) for n in (1, 2, 3)]
    first, second, third = (files_of(tmp_path / str(n)) for n in (1, 2, 3))
    assert first == second == third and len({one.digest for one in made}) == 1
    assert not any("building" in name for name in first)
    whole = concat_tables([make_table(300, first=n * 300) for n in range(5)])
    reader = open_store(str(tmp_path / "3"))
    assert_same(reader.read(np.arange(1500)), whole)
    assert reader.manifest.row_hashes == hash_rows(np.arange(1500))
    assert verify_store(reader.folder) == []


def test_how_tables_divide_the_rows_changes_nothing(tmp_path):
    whole = make_table(900)
    cuts = [0, 1, 2, 500, 900]
    parts = [whole.slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    for name, source in {"a": [whole], "b": parts, "c": iter(parts)}.items():
        build_store(source, f"{tmp_path}/{name}", options=options())
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") == files_of(tmp_path / "c")


def test_a_build_goes_on_where_it_stopped(tmp_path):
    opened = []

    def read(number, fails):
        opened.append(number)
        if number in fails:
            raise RequestError(f"unit {number} is torn")
        return [make_table(100, first=100 * number)]

    def units(fails=()):
        return [Unit(name=f"u{n}", open=lambda n=n: read(n, fails), fingerprint="same") for n in range(4)]

    schema = make_table(1).schema
    with pytest.raises(RequestError, match="unit 2 is torn"):
        build_store(units(fails=(2,)), str(tmp_path), options=options(), schema=schema)
    assert newest_version(str(tmp_path)) is None
    opened.clear()
    build_store(units(), str(tmp_path), options=options(), schema=schema)
    assert opened == [2, 3]
    assert len(open_store(str(tmp_path))) == 400


def test_a_unit_that_is_another_file_now_is_done_anew(tmp_path):
    def unit(fingerprint, first):
        good = Unit(name="u", open=lambda: [make_table(50, first=first)], fingerprint=fingerprint)

        def torn():
            raise RequestError("torn")

        return good, Unit(name="v", open=torn)

    schema = make_table(1).schema
    with pytest.raises(RequestError):
        build_store(unit("1", 0), str(tmp_path), options=options(), schema=schema)
    build_store(unit("2", 900)[:1], str(tmp_path), options=options(), schema=schema)
    assert open_store(str(tmp_path)).read(np.array([0]))["id"].value(0) == 2700


def test_an_error_and_a_death_in_a_process_are_told_by_the_unit(tmp_path):
    def torn():
        raise RequestError("shard 3, row 7: no number")

    def die():
        import os

        os._exit(5)

    schema = make_table(1).schema
    for source, kind, words in ((torn, RequestError, "shard 3, row 7"), (die, RunError, "unit x died .exit code 5")):
        units = [*make_units(2), Unit(name="unit x", open=source)]
        with pytest.raises(kind, match=words):
            build_store(units, str(tmp_path / kind.__name__), options=options(workers=2), schema=schema)


def test_wrong_requests_are_refused(tmp_path):
    build_store(make_units(1), str(tmp_path / "s"), options=options())
    with pytest.raises(RequestError, match="holds a store already"):
        build_store(make_units(1), str(tmp_path / "s"), options=options())
    with pytest.raises(RequestError, match="no row"):
        build_store([], str(tmp_path / "e"), options=options())
    with pytest.raises(RequestError, match="outside"):
        build_store(make_units(1), str(tmp_path / "e"), options=BuildOptions(block=BlockOptions(target_bytes=3)))
    with pytest.raises(RequestError, match="a key is a whole number"):
        build_store(make_units(1), str(tmp_path / "e"), options=BuildOptions(block=SMALL, key="x"))
    other = Unit(name="last shard", open=lambda: [Table.of([number_column("id", np.arange(3))])])
    with pytest.raises(RequestError, match="last shard: it has 1 columns and had 6"):
        build_store([*make_units(1), other], str(tmp_path / "e"), options=BuildOptions(block=SMALL))
    with pytest.raises(RequestError, match="no store of data"):
        append_store([make_table(1)], str(tmp_path / "none"))
    with pytest.raises(RequestError, match="columns"):
        append_store([Table.of([number_column("id", np.arange(3))])], str(tmp_path / "s"))


def test_an_append_adds_a_version_and_changes_none(tmp_path):
    build_store(make_units(2), str(tmp_path), options=options())
    before = files_of(tmp_path)
    old = open_store(str(tmp_path))
    made = append_store([make_table(100, first=600)], str(tmp_path), block=SMALL)
    assert made.version == 2 == newest_version(str(tmp_path)) and made.num_rows == 700
    now = files_of(tmp_path)
    assert {name: now[name] for name in before} == before
    assert len(old) == 600 and old.version == 1
    new = open_store(str(tmp_path))
    # A row's number is its id for ever.
    rows = np.arange(600)
    assert_same(new.read(rows), old.read(rows))
    assert_same(new.read(np.arange(600, 700)), make_table(100, first=600))
    assert new.manifest.row_hashes == hash_rows(np.arange(700))
    assert new.find([3 * 650, 3 * 5]).tolist() == [650, 5]
    assert append_store([], str(tmp_path)).version == 2


def test_what_was_taken_in_is_not_taken_in_again(tmp_path):
    build_store(make_units(1), str(tmp_path), options=options(), offsets={"log": 10})
    made = append_store([make_table(5)], str(tmp_path), offsets={"log": 15}, after={"log": 10})
    assert (made.version, made.num_rows, made.source) == (2, 305, {"log": 15})
    # Whoever died after the commit and tries again.
    assert append_store([make_table(5)], str(tmp_path), offsets={"log": 15}, after={"log": 10}).version == 2
    with pytest.raises(RequestError, match="read the source again from there"):
        append_store([make_table(5)], str(tmp_path), offsets={"log": 20}, after={"log": 10})
    assert newest_version(str(tmp_path)) == 2


def test_many_appenders_at_once_lose_nothing(tmp_path):
    build_store(make_units(1), str(tmp_path), options=options())
    start = threading.Barrier(4)

    def append(number):
        start.wait(timeout=30)
        for turn in range(3):
            append_store([make_table(20, first=10_000 * number + 20 * turn)], str(tmp_path), block=SMALL)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    reader = open_store(str(tmp_path))
    assert reader.version == 13 and len(reader) == 300 + 4 * 3 * 20
    ids = reader.read(np.arange(len(reader)))["id"].values
    assert len(set(ids.tolist())) == len(ids)
    assert reader.find(ids.tolist()).tolist() == list(range(len(ids)))
    assert verify_store(reader.folder) == []


class LostAnswer(MemoryStorage):
    """A storage that does what it is asked, whose answer is lost once, and that is asked again by its client."""

    def create(self, path, content):
        super().create(path, content)
        if path.endswith("manifest-00000002.json"):
            super().create(path, content)


def test_an_append_whose_answer_was_lost_is_in_the_store_once(monkeypatch):
    folder = StoreFolder(LostAnswer("lost"), "s")
    monkeypatch.setattr("shoal.data.store.writer.open_folder", lambda address: folder)
    build_store(make_units(1), "s", options=options())
    made = append_store([make_table(7)], "s")
    assert (made.version, made.num_rows, folder.newest_version()) == (2, 307, 2)
