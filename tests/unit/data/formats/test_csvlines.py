"""CSV files: what is a row, and where one that is none is named."""

import gzip
import json

import pytest

from shoal.core.errors import RequestError
from shoal.data.formats.opening import open_data
from shoal.data.formats.options import BadRow, ReadOptions, Rejects
from shoal.data.table import concat_tables


def read(path, **options):
    opened = open_data(str(path), options=ReadOptions(**options))
    return concat_tables(list(opened.tables()))


def rows_of(table):
    return [tuple(column.value(row) for column in table.columns) for row in range(len(table))]


def test_kinds_are_found_and_missing_is_no_number(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b,c,d,e\n1,nan,yes,true,2026-01-02\n,2.5,"two\nlines",false,\n')
    table = read(path)
    assert [column.field.kind for column in table.columns] == ["<i8", "<f8", "text", "|b1", "<M8[us]"]
    assert table["b"].valid is None, "NaN is a number that was measured"
    assert rows_of(table)[1][:4] == (None, 2.5, "two\nlines", False)
    assert table["e"].value(1) is None


@pytest.mark.parametrize(
    ("late", "column", "said"),
    [
        ("x,1", "a", "'x' is no whole number"),
        ("1_0,1", "a", "'1_0' is no whole number"),
        ("9223372036854775808,1", "a", "is no whole number"),
        ("1,0x10", "b", "'0x10' is no number"),
        ("1", None, "the row has 1 fields and the header 2"),
    ],
)
def test_a_row_that_does_not_fit_is_named_or_goes_to_the_rejects(tmp_path, late, column, said):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,1.5\n" * 5 + late + "\n2,2.5\n")
    with pytest.raises(BadRow, match=r"a\.csv, row 6") as error:
        read(path, head_rows=3)
    assert said in str(error.value) and error.value.column == column
    rejects = tmp_path / "rejects.jsonl"
    table = read(path, head_rows=3, rejects=Rejects(rejects))
    assert len(table) == 6 and table["a"].values.tolist() == [1] * 5 + [2]
    (told,) = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert (told["row"], told["column"]) == (6, column) and said in told["why"]


def test_small_batches_give_the_same_rows(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(("a,t\n" + "".join(f"{i},w{i}\n" for i in range(100))).encode()))
    whole, parts = read(path), read(path, batch_rows=7)
    assert rows_of(whole) == rows_of(parts) == [(i, f"w{i}") for i in range(100)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"a,a\n1,2\n", "two columns of the name 'a'"),
        (b"a\n" + b"9" * 5000 + b"\n", "line 2 has more than"),
        (b"a\n\xff\xfe\n", "is no UTF-8"),
        (b'a\n"open\n', "quote"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, said):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=said):
        read(path, value_bytes=4096)


def test_a_gzip_bomb_is_refused_by_its_first_line(tmp_path):
    path = tmp_path / "bomb.csv.gz"
    path.write_bytes(gzip.compress(b"a" * (1 << 24)))
    with pytest.raises(RequestError, match=r"bomb\.csv\.gz, line 1 has more than"):
        read(path, value_bytes=1 << 16)


def test_a_torn_gzip_file_is_refused(tmp_path):
    path = tmp_path / "torn.csv.gz"
    path.write_bytes(gzip.compress(b"a\n" + b"1\n" * 1000)[:-10])
    with pytest.raises(RequestError, match=r"torn\.csv\.gz, line \d+: not a whole"):
        read(path)
