"""Windows of token ids are those of the ids in one piece, wherever blocks are cut."""

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.reader import open_store
from shoal.data.store.tokens import TokenSequence, choose_tokens
from shoal.data.store.writer import BuildOptions, append_store, build_store
from shoal.data.table import Column, Field, Table, number_column, text_column

IDS = np.random.default_rng(0).integers(0, 300, size=40_000).astype("<u2")
SMALL = BuildOptions(block=BlockOptions(target_bytes=1 << 14))


def one_a_row():
    return [Table.of([number_column("tokens", IDS[:30_000])]), Table.of([number_column("tokens", IDS[30_000:])])]


def documents():
    ends = np.unique(np.r_[0, np.random.default_rng(1).integers(0, len(IDS), size=200), len(IDS)])
    column = Column(field=Field(name="tokens", kind="list:<u2"), values=IDS, offsets=ends.astype(np.int64))
    table = Table.of([text_column("title", ["x"] * len(column)), column])
    return [table.slice(0, 77), table.slice(77, len(table))]


@pytest.mark.parametrize("tables", [one_a_row, documents])
@pytest.mark.parametrize("length", [1, 33, 9000])
def test_windows_are_those_of_the_ids_in_one_piece(tmp_path, tables, length):
    first, second = tables()
    build_store([first], str(tmp_path), options=SMALL)
    append_store([second], str(tmp_path), block=SMALL.block)
    reader = open_store(str(tmp_path))
    tokens = TokenSequence(reader, "tokens")
    assert (
        reader.num_blocks > 4 and len(tokens) == len(IDS) and (tokens.lowest, tokens.highest) == (IDS.min(), IDS.max())
    )
    starts = np.random.default_rng(2).integers(0, len(IDS) - length + 1, size=64)
    starts[:2] = 0, len(IDS) - length
    for asked in (starts, np.sort(starts), starts[:1], starts[:0]):
        expected = np.array([IDS[start : start + length] for start in asked]).reshape(-1, length)
        assert np.array_equal(tokens.windows(asked, length), expected)


def test_the_column_is_chosen_or_named():
    schema = Table.of(
        [number_column("a", np.arange(2)), number_column("b", np.arange(2)), number_column("c", np.ones(2))]
    ).schema
    assert choose_tokens(schema, "b") == "b"
    with pytest.raises(RequestError, match="a, b all could be"):
        choose_tokens(schema, None)
    with pytest.raises(RequestError, match="not whole numbers"):
        choose_tokens(schema, "c")
    with pytest.raises(RequestError, match="no column"):
        choose_tokens(schema, "d")


def test_missing_ids_are_refused(tmp_path):
    build_store([Table.of([number_column("tokens", IDS[:4], np.array([True, False, True, True]))])], str(tmp_path))
    with pytest.raises(RequestError, match="1 rows without a value"):
        TokenSequence(open_store(str(tmp_path)), "tokens")
