"""A whole store is whole; what is wrong with another one is told by file; what no version names is found and can go."""

import os

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.checks.unreferenced import delete_unreferenced, find_unreferenced
from shoal.data.store.checks.watch import WatchedStore
from shoal.data.store.checks.whole import verify_store
from shoal.data.store.folder import open_folder
from shoal.data.store.reader import open_store
from shoal.data.store.selection import RowSelection
from shoal.data.store.splits import Split, write_split
from shoal.data.store.writer import BuildOptions, append_store, build_store
from support.data.tables import make_table

SMALL = BlockOptions(target_bytes=1 << 14)


@pytest.fixture
def folder(tmp_path):
    build_store([make_table(600)], str(tmp_path), options=BuildOptions(block=SMALL, key="id"))
    append_store([make_table(100, first=600)], str(tmp_path), block=SMALL)
    found = open_folder(str(tmp_path))
    parts = {"train": RowSelection.of_range(range(600)), "test": RowSelection.of_range(range(600, 700))}
    write_split(found, Split(name="halves", version=2, num_rows=700, parts=parts))
    return found


def all_files(root):
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_one_flipped_bit_in_any_file_is_told_by_its_name(folder, tmp_path):
    assert verify_store(folder) == []
    draw = np.random.default_rng(4)
    for path in all_files(tmp_path):
        data = path.read_bytes()
        for bit in draw.integers(0, len(data) * 8, size=4):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert any(path.name in problem.file for problem in verify_store(folder)), (path, bit)
        path.write_bytes(data)
    assert verify_store(folder) == []


def test_a_missing_block_is_told(folder, tmp_path):
    path = next((tmp_path / "blocks").iterdir())
    path.unlink()
    [problem] = verify_store(folder)
    assert path.name in problem.file and "gone" in problem.problem


def test_what_no_version_names_is_found_and_deleted_when_it_is_old(folder, tmp_path):
    before = all_files(tmp_path)
    assert find_unreferenced(folder, older_s=0) == []
    left = folder.write("blocks", b"left by a killed append", 1)
    (tmp_path / "building" / "unit-000000.json").write_text("{}")
    assert find_unreferenced(folder) == [] and len(find_unreferenced(folder, older_s=0)) == 2
    path = tmp_path / "blocks" / f"{left.digest}.block"
    os.utime(path, (1, 1))
    assert [entry.path.rpartition("/")[2] for entry in delete_unreferenced(folder, older_s=3600)] == [path.name]
    delete_unreferenced(folder, older_s=0)
    assert all_files(tmp_path) == before and verify_store(folder) == []
    # A reader of the first version has all its blocks.
    assert len(open_store(str(tmp_path), version=1).read(np.arange(600))) == 600


def test_ages_of_another_machine_are_not_trusted():
    build_store([make_table(5)], "memory://ages")
    with pytest.raises(RequestError, match="not on this machine"):
        find_unreferenced(open_folder("memory://ages"))


def test_a_watched_store_tells_what_was_done_to_a_block(folder, tmp_path):
    reader = open_store(str(tmp_path))
    watched = WatchedStore(reader)
    assert watched.find_damage() is None
    path = tmp_path / "blocks" / f"{reader.block_list.digest(2)}.block"
    data = path.read_bytes()
    os.utime(path, ns=(5, 5))
    assert watched.find_damage() is None
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{path.name} was written to" in watched.find_damage()
    path.write_bytes(data)
    assert watched.find_damage() is None
    append_store([make_table(1)], str(tmp_path))
    assert watched.find_damage() is None
    path.unlink()
    assert f"{path.name} was deleted" in watched.find_damage()
