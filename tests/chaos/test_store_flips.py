"""One flipped bit anywhere in a store is found, by whoever reads it and by verify, and the file is named: 600 of 600."""

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.checks.whole import verify_store
from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import open_folder
from shoal.data.store.reader import open_store
from shoal.data.store.writer import BuildOptions, append_store, build_store
from support.data.tables import assert_same, make_table

NUM_FLIPS = 300


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def read_everything(address):
    reader = open_store(address)
    rows = reader.read(np.arange(len(reader)))
    # A key of every sorted file of the index.
    reader.find(rows["id"].values.tolist())
    return rows


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_every_flip_is_found_and_named(tmp_path, codec):
    block = BlockOptions(target_bytes=1 << 14, codec=codec)
    build_store([make_table(300)], str(tmp_path), options=BuildOptions(block=block, key="id"))
    append_store([make_table(100, first=300)], str(tmp_path), block=block)
    # Of the first version nothing but its manifest is of that version alone, and nobody reads that here.
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path.name != "manifest-00000001.json"]
    assert {path.parent.name for path in files} == {"blocks", "index", "parts", "versions"}
    expected = read_everything(str(tmp_path))
    draw = np.random.default_rng(2)
    for number in range(NUM_FLIPS):
        path = files[int(draw.integers(len(files)))]
        bit = int(draw.integers(path.stat().st_size * 8))
        flip(path, bit)
        with pytest.raises(BrokenFile) as found:
            read_everything(str(tmp_path))
        assert path.name in str(found.value), f"flip {number}, bit {bit} of {path.name}"
        if number % 10 == 0:
            assert path.name in [
                problem.file.rpartition("/")[2] for problem in verify_store(open_folder(str(tmp_path)))
            ]
        flip(path, bit)
    assert_same(read_everything(str(tmp_path)), expected)
    assert verify_store(open_folder(str(tmp_path))) == []


def test_missing_swapped_and_foreign_blocks_are_found(tmp_path):
    address = str(tmp_path)
    build_store(
        [make_table(300)], address, options=BuildOptions(block=BlockOptions(target_bytes=1 << 12 << 2), key="id")
    )
    first, second = sorted((tmp_path / "blocks").iterdir())[:2]
    saved = first.read_bytes(), second.read_bytes()
    first.write_bytes(saved[1])
    with pytest.raises(BrokenFile, match=first.name):
        read_everything(address)
    first.unlink()
    with pytest.raises(BrokenFile, match=f"{first.name}: it is gone"):
        read_everything(address)
    first.write_bytes(saved[0])
    read_everything(address)
    for path in (tmp_path / "versions").iterdir():
        path.unlink()
    with pytest.raises(RequestError, match="is no store of data"):
        read_everything(address)
