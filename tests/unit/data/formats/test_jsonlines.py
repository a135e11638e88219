"""JSON lines, strictly."""

import json

import pytest

from shoal.data.formats.opening import open_data
from shoal.data.formats.options import BadRow, ReadOptions, Rejects
from shoal.data.table import concat_tables


def read(path, **options):
    return concat_tables(list(open_data(str(path), options=ReadOptions(**options)).tables()))


def test_numbers_lists_and_missing_keys(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1, "l": [1, 2], "t": "x"}\n\n{"a": 2.5, "l": [], "t": null}\n{"l": [0.5]}\n')
    table = read(path)
    assert table.schema["a"].kind == "<f8" and table.schema["l"].kind == "list:<f8"
    assert [table["a"].value(row) for row in range(3)] == [1.0, 2.5, None]
    assert [table["l"].value(row).tolist() for row in range(3)] == [[1.0, 2.0], [], [0.5]]
    assert table["t"].value(1) is None


@pytest.mark.parametrize(
    ("late", "column", "said"),
    [
        ('{"a": "x"}', "a", "'x' is no"),
        ('{"a": true}', "a", "'True' is no"),
        ('{"a": 1, "b": 2}', "b", "no row of the first"),
        ('{"a": 1', None, "no JSON"),
        ('{"a": NaN}', None, "no JSON"),
        ("[1]", None, "a row is one JSON object"),
        ("[" * 3000, None, "no JSON"),
    ],
)
def test_a_row_that_does_not_fit(tmp_path, late, column, said):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' * 4 + late + '\n{"a": 2}\n')
    with pytest.raises(BadRow, match=r"a\.jsonl, row 5") as error:
        read(path, head_rows=2)
    assert said in str(error.value) and error.value.column == column
    rejects = tmp_path / "rejects"
    assert len(read(path, head_rows=2, rejects=Rejects(rejects))) == 5
    assert json.loads(rejects.read_text())["row"] == 5
