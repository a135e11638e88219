"""A block gives back the rows that it was made of, and a forged one takes no memory and is refused by name."""

import itertools
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from shoal.core.errors import RequestError
from shoal.data.store.block import ALIGNMENT, cut_into_blocks, encode_block, read_block, read_header
from shoal.data.store.errors import BrokenFile
from shoal.data.table import Column, Field, Table, concat_tables, number_column
from support.data.tables import assert_same, make_table

MEGABYTE = 2**20


def read(data, schema):
    return read_block(memoryview(data), schema, file="some.block")


def change(data, place, kind, value):
    changed = bytearray(data)
    struct.pack_into(kind, changed, place, value)
    return bytes(changed)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 1000])
def test_rows_come_back(codec, num_rows):
    table = make_table(num_rows)
    data = encode_block(table, codec=codec)
    assert_same(read(data, table.schema), table)
    assert encode_block(make_table(num_rows), codec=codec) == data


def test_arrays_lie_in_the_file_and_are_aligned():
    table = make_table(100)
    data = encode_block(table)
    whole = np.frombuffer(data, dtype=np.uint8)
    for column in read(data, table.schema).columns:
        assert np.shares_memory(column.values, whole)
        place = column.values.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        assert place % ALIGNMENT == 0


def test_a_mask_without_a_gap_is_no_mask():
    values = np.arange(5)
    plain, masked = number_column("a", values), number_column("a", values, np.ones(5, dtype=np.bool_))
    assert encode_block(Table.of([plain])) == encode_block(Table.of([masked]))
    assert read(encode_block(Table.of([masked])), Table.of([plain]).schema)["a"].valid is None


def test_every_truncation_is_refused():
    table = make_table(3)
    data = encode_block(table)
    for length in range(0, len(data), 13):
        with pytest.raises(BrokenFile, match=r"some\.block"):
            read(data[:length], table.schema)
    with pytest.raises(BrokenFile):
        read(data + b"\0", table.schema)


# Magic, version, codec, columns, rows, payload, unpacked; elements and gaps of the fourth column, a list.
PLACES = {0: "<8s", 8: "<H", 10: "<H", 12: "<I", 16: "<Q", 24: "<Q", 32: "<Q", 64 + 48: "<Q", 64 + 56: "<Q"}


@pytest.mark.parametrize(("place", "kind"), PLACES.items())
def test_numbers_of_a_header_that_do_not_agree_are_refused_before_memory_is_taken(place, kind):
    table = make_table(50)
    for codec in ("none", "zstd"):
        data = encode_block(table, codec=codec)
        (before,) = struct.unpack_from(kind, data, place)
        values = [b"SHOALBLX"] if kind == "<8s" else [v for v in (0, 1, 2, before + 1, 2**16 - 1, 2**31) if v != before]
        values += [2**40, 2**63, 2**64 - 1] if kind == "<Q" else []
        for value in values:
            if not isinstance(value, bytes) and value >= 2 ** (8 * struct.calcsize(kind)):
                continue
            tracemalloc.start()
            with pytest.raises(BrokenFile):
                read(change(data, place, kind, value), table.schema)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < MEGABYTE, (place, value)


def test_a_zip_bomb_is_refused_before_it_is_unpacked():
    table = Table.of([number_column("a", np.zeros(64, dtype=np.uint8))])
    data = encode_block(table, codec="zstd")
    start = read_header(memoryview(data), table.schema, file="x").payload_start
    bomb = zstandard.ZstdCompressor().compress(bytes(300 * MEGABYTE))
    shy = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(300 * MEGABYTE))
    more = zstandard.ZstdCompressor().compress(bytes(64)) * 2
    for frame in (bomb, shy, b"", b"nonsense", more[: len(more) // 2 - 1]):
        forged = change(data[:start] + frame, 24, "<Q", len(frame))
        tracemalloc.start()
        with pytest.raises(BrokenFile):
            read(forged, table.schema)
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
        tracemalloc.stop()
    # A header that agrees with the bomb is longer than a block may be.
    wide = Table.of([Column(field=Field(name="a", kind="|u1", shape=(2**31,)), values=np.empty((0, 2**31), np.uint8))])
    with pytest.raises(BrokenFile):
        read(change(data, 16, "<Q", 1), wide.schema)


def test_lengths_that_go_back_are_refused():
    table = Table.of([make_table(20)["list"]])
    data = bytearray(encode_block(table))
    start = read_header(memoryview(data), table.schema, file="x").payload_start
    offsets = np.frombuffer(data, dtype=np.int64, count=21, offset=start)
    for place, value in ((3, -1), (3, 2**40), (20, int(offsets[20]) - 1), (0, 1)):
        forged = change(data, start + 8 * place, "<q", value)
        with pytest.raises(BrokenFile, match="do not add up"):
            read(forged, table.schema)


def test_other_columns_are_refused():
    table, other = make_table(5), Table.of([number_column("a", np.arange(5))])
    with pytest.raises(BrokenFile, match="other columns"):
        read(encode_block(table), other.schema)


def test_too_much_for_a_block_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr("shoal.data.store.block.MAX_RAW_BYTES", 1000)
    with pytest.raises(RequestError, match="2000 rows"):
        encode_block(make_table(2000))


def test_where_blocks_are_cut_does_not_depend_on_how_rows_arrive():
    whole = make_table(500)
    cuts = list(cut_into_blocks(whole, 2000))
    assert cuts[0][0] == 0 and cuts[-1][1] == 500 and len(cuts) > 5
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
    parts = concat_tables([whole.slice(0, 17), whole.slice(17, 18), whole.slice(18, 500)])
    assert list(cut_into_blocks(parts, 2000)) == cuts
    # A row that is larger than a block is a block.
    assert list(cut_into_blocks(whole.slice(0, 3), 1)) == [(0, 1), (1, 2), (2, 3)]
