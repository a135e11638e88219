"""Splits come back as they were made, whichever way they are kept, and share no row."""

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import open_folder
from shoal.data.store.selection import RowSelection
from shoal.data.store.splits import Split, list_splits, read_split, write_split
from shoal.data.store.writer import append_store, build_store
from support.data.tables import make_table

ROWS = 100_000


@pytest.fixture
def folder(tmp_path):
    build_store([make_table(500)], str(tmp_path))
    return open_folder(str(tmp_path))


def cut(rows, **parts):
    return Split(
        name="by-user", version=1, num_rows=rows, parts={name: RowSelection.of(found) for name, found in parts.items()}
    )


def test_a_selection_has_its_rows_by_their_places():
    draw = np.random.default_rng(0)
    for chosen in (
        np.arange(5, 90),
        draw.permutation(100)[:40],
        np.array([3]),
        np.r_[0:30, 50:60, 90:99],
        np.arange(0),
    ):
        selection = RowSelection.of(chosen)
        places = np.arange(len(chosen))
        assert len(selection) == len(chosen)
        assert selection.rows(places).tolist() == sorted(chosen.tolist())
        assert selection.rows(places[::-3]).tolist() == sorted(chosen.tolist())[::-3]
    assert RowSelection.of_range(range(4, 4)).rows(np.arange(0)).tolist() == []
    assert RowSelection.of(np.array([1, 5])).overlaps(RowSelection.of(np.array([5, 9])))
    assert not RowSelection.of(np.array([1, 5])).overlaps(RowSelection.of(np.array([2, 4, 6])))


def test_splits_come_back(folder):
    draw = np.random.default_rng(0).permutation(500)
    write_split(folder, cut(500, train=draw[:300], validation=draw[300:350], test=draw[350:500]))
    found = read_split(folder, "by-user")
    assert {name: part.rows(np.arange(len(part))).tolist() for name, part in found.parts.items()} == {
        "train": sorted(draw[:300].tolist()),
        "validation": sorted(draw[300:350].tolist()),
        "test": sorted(draw[350:].tolist()),
    }
    assert list_splits(folder) == ["by-user"] and found.digest
    append_store([make_table(10)], folder.address)
    assert len(read_split(folder, "by-user").parts["train"]) == 300
    with pytest.raises(RequestError, match="already"):
        write_split(folder, cut(500, train=draw))
    write_split(folder, cut(500, train=draw), replaces=True)
    assert set(read_split(folder, "by-user").parts) == {"train"}
    with pytest.raises(RequestError, match="did you mean 'by-user'"):
        read_split(folder, "by-users")


def test_many_rows_all_over_are_kept_as_bits(tmp_path):
    build_store([make_table(1)], str(tmp_path / "one"))
    draw = np.random.default_rng(1).permutation(ROWS)
    store = tmp_path / "many"
    build_store([make_table(ROWS)], str(store))
    folder = open_folder(str(store))
    write_split(folder, cut(ROWS, train=draw[:60_000], test=draw[60_000:]))
    size = sum(path.stat().st_size for path in (store / "splits").glob("*.block"))
    assert size < 2 * ROWS / 8 + 10_000
    found = read_split(folder, "by-user").parts
    assert np.array_equal(found["train"].rows(np.arange(60_000)), np.sort(draw[:60_000]))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (cut(500, train=np.arange(10), test=np.arange(9, 12)), "share rows"),
        (cut(500, train=np.arange(501)), "has row 500"),
        (cut(499, train=np.arange(3)), "version 1 has 500"),
        (cut(500, dev=np.arange(3)), "dev"),
        (Split(name="../x", version=1, num_rows=500, parts={}), "cannot name"),
    ],
    ids=["shared", "beyond", "other-version", "other-part", "path"],
)
def test_wrong_splits_are_refused(folder, split, words):
    with pytest.raises(RequestError, match=words):
        write_split(folder, split)
    assert list_splits(folder) == []


def test_an_altered_split_is_found(folder, tmp_path):
    write_split(folder, cut(500, train=np.arange(0, 500, 2), test=np.arange(1, 500, 2)))
    for path in (tmp_path / "splits").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        with pytest.raises(BrokenFile, match=path.name):
            read_split(folder, "by-user")
        path.write_bytes(data)
    read_split(folder, "by-user")
