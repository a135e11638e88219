"""Rows come back in any order, by number and by key, from every kind of store; a wrong byte is found and named."""

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.storage.memory import MemoryStorage
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import StoreFolder
from shoal.data.store.reader import StoreReader, open_store
from shoal.data.store.writer import BuildOptions, append_store, build_store
from shoal.data.table import Table, concat_tables, number_column, text_column
from support.data.tables import assert_same, make_table

WHOLE = make_table(1000)


def make_store(address, codec="none", key="id"):
    block = BlockOptions(target_bytes=1 << 14, codec=codec)
    build_store([WHOLE.slice(0, 900)], address, options=BuildOptions(block=block, key=key))
    append_store([WHOLE.slice(900, 1000)], address, block=block)
    return address


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("load", ["whole", "blocks", "index"])
@pytest.mark.parametrize("place", ["local", "memory"])
def test_rows_come_back_in_any_order(tmp_path, place, load, codec):
    address = str(tmp_path) if place == "local" else f"memory://{codec}-{load}/folder"
    reader = open_store(make_store(address, codec), load=load)
    assert reader.num_blocks > 3 and len(reader) == 1000 and reader.version == 2
    draw = np.random.default_rng(1)
    asked = [draw.integers(0, 1000, size=size) for size in (0, 1, 2, 32, 500)]
    asked += [np.arange(1000), np.arange(999, -1, -1), np.array([5, 5, 999, 5]), np.arange(100, 110)]
    for rows in asked:
        assert_same(reader.read(rows), WHOLE.take(rows))


def test_some_columns_and_an_old_version(tmp_path):
    address = make_store(str(tmp_path))
    reader = open_store(address, version=1, columns=["name", "id"])
    assert reader.schema.names == ("name", "id") and len(reader) == 900
    rows = np.array([3, 800, 7])
    found = reader.read(rows)
    assert_same(found, Table(columns=(WHOLE.take(rows)["name"], WHOLE.take(rows)["id"]), num_rows=3))
    with pytest.raises(RequestError, match="no version 3; it has versions 1 to 2"):
        open_store(address, version=3)
    with pytest.raises(RequestError, match="did you mean 'name'"):
        open_store(address, columns=["nam"])
    for rows in ([900], [-1]):
        with pytest.raises(RequestError, match="has 900"):
            reader.read(np.array(rows))


def test_statistics_over_all_blocks(tmp_path):
    stats = open_store(make_store(str(tmp_path))).stats()
    assert (stats["id"].min, stats["id"].max, stats["id"].rows) == (0, 2997, 1000)
    column = WHOLE["x"]
    assert stats["x"].missing == int((~column.valid).sum())
    assert stats["x"].mean == pytest.approx(column.values[column.valid].astype(np.float64).mean())


def test_rows_by_key(tmp_path):
    reader = open_store(make_store(str(tmp_path)))
    assert reader.find([0, 3, 4, 2997, -3, 2**62]).tolist() == [0, 1, -1, 999, -1, -1]
    for key, words in ((True, "whole number"), ("3", "whole number"), (2**64, "is from")):
        with pytest.raises(RequestError, match=words):
            reader.find([key])
    build_store([WHOLE], str(tmp_path / "other"), options=BuildOptions())
    with pytest.raises(RequestError, match="without a key"):
        open_store(str(tmp_path / "other")).find([3])


def test_keys_that_repeat_are_missing_or_are_text(tmp_path, monkeypatch):
    names = [None if i % 10 == 0 else f"user {i % 7}" for i in range(500)]
    table = Table.of([text_column("user", names), number_column("n", np.arange(500))])
    expected = {name: [i for i in range(500) if names[i] == name] for name in set(names) - {None}}

    def check(folder):
        block = BlockOptions(target_bytes=1 << 14)
        build_store([table.slice(0, 300)], folder, options=BuildOptions(key="user", block=block))
        append_store([table.slice(300, 500)], folder)
        reader = open_store(folder)
        for name, rows in expected.items():
            assert reader.find_all(name).tolist() == rows
        assert reader.find_all("user 9").tolist() == [] and reader.find(["user 3"])[0] == expected["user 3"][0]

    check(str(tmp_path / "a"))
    # All keys have one hash: the rows themselves decide.
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda data: 7)
    check(str(tmp_path / "b"))


def test_a_lookup_reads_one_sorted_file(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.data.store.index.RUN_ROWS", 100)
    reader = open_store(make_store(str(tmp_path)))
    read = []
    original = StoreFolder.read
    monkeypatch.setattr(
        StoreFolder, "read", lambda self, folder, ref: read.append(folder) or original(self, folder, ref)
    )
    assert reader.find([3 * 450]).tolist() == [450]
    # One list for each of the two parts, and one of the nine sorted files of the first.
    assert read == ["index", "index", "index"]


def test_a_wrong_byte_is_found_and_named(tmp_path):
    reader = open_store(make_store(str(tmp_path)))
    path = tmp_path / "blocks" / f"{reader.block_list.digest(1)}.block"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    start = int(reader.block_starts[1])
    assert len(reader.read(np.arange(start))) == start
    with pytest.raises(BrokenFile, match=f"{path.name}: its bytes are not those that were written"):
        reader.read(np.array([start]))
    path.write_bytes(data[:-1])
    with pytest.raises(BrokenFile, match=f"{path.name}: it has {len(data) - 1} bytes"):
        reader.read(np.array([start]))
    path.unlink()
    with pytest.raises(BrokenFile, match=f"{path.name}: it is gone"):
        reader.read(np.array([start]))


class Flaky(MemoryStorage):
    """A storage that answers with a wrong byte so many times."""

    wrong = 0

    def read(self, path, start=0, end=None):
        data = super().read(path, start, end)
        if self.wrong and path.endswith(".block"):
            self.wrong -= 1
            return data[:-1] + bytes([data[-1] ^ 1])
        return data


def test_wrong_bytes_from_far_away_are_fetched_again(monkeypatch):
    folder = StoreFolder(Flaky("flaky"), "")
    monkeypatch.setattr("shoal.data.store.writer.open_folder", lambda address: folder)
    make_store("anywhere")
    reader = StoreReader(folder, folder.manifest())
    folder.storage.wrong = 1
    assert_same(reader.read(np.array([3, 1])), WHOLE.take(np.array([3, 1])))
    reader = StoreReader(folder, folder.manifest())
    folder.storage.wrong = 2
    with pytest.raises(BrokenFile, match=r"memory://flaky/blocks/.*its bytes are not"):
        reader.read(np.array([999]))


def test_few_blocks_are_kept_where_memory_is_small(tmp_path):
    address = make_store(str(tmp_path), "zstd")
    small, large = open_store(address, fetched_bytes=1), open_store(address)
    rows = np.tile(np.arange(0, 1000, 50), 3)
    for row in rows:
        assert_same(small.read(np.array([row])), WHOLE.take(np.array([row])))
        large.read(np.array([row]))
    assert large.blocks.num_opened == large.num_blocks < small.blocks.num_opened


def test_a_large_read_equals_its_parts(tmp_path):
    reader = open_store(make_store(str(tmp_path)))
    parts = [reader.read(np.arange(start, start + 100)) for start in range(0, 1000, 100)]
    assert_same(concat_tables(parts), WHOLE)
