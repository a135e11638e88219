"""Parquet: nulls, Hive folders, and files that lie."""

import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.core.errors import RequestError
from shoal.data.formats.files import DataFile
from shoal.data.formats.opening import open_data
from shoal.data.formats.options import ReadOptions
from shoal.data.formats.parquetpages import _Compact
from shoal.data.table import concat_tables


def read(path, where=None, **options):
    return concat_tables(list(open_data(str(path), where=where, options=ReadOptions(**options)).tables()))


def test_a_null_is_missing_and_nan_is_a_number(tmp_path):
    pq.write_table(pa.table({"x": [1.0, float("nan"), None], "s": ["a", None, "b"]}), tmp_path / "a.parquet")
    table = read(tmp_path / "a.parquet")
    assert table["x"].valid.tolist() == [True, True, False]
    assert np.isnan(table["x"].values[1]) and table["x"].values[2] == 0
    assert [table["s"].value(row) for row in range(3)] == ["a", None, "b"]


def test_every_type_comes_through_in_batches(tmp_path):
    whole = pa.table(
        {
            "i": pa.array([1, None, 3, 4], pa.int32()),
            "l": [[1.0], [], None, [2.0, 3.0]],
            "f": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int64(), 2)),
            "t": pa.array([0, None, 5_000, 7_000], pa.timestamp("ns", tz="UTC")),
            "d": pa.array([1, 2, None, 4], pa.date32()),
            "c": pa.array(["u", "v", None, "u"]).dictionary_encode(),
            "b": [True, None, False, True],
        }
    )
    pq.write_table(whole, tmp_path / "a.parquet", row_group_size=3)
    table = read(tmp_path / "a.parquet", batch_rows=2)
    expected = whole.to_pylist()
    for row, values in enumerate(expected):
        assert table["i"].value(row) == values["i"] and table["c"].value(row) == values["c"]
        assert table["b"].value(row) == values["b"] and table["f"].value(row).tolist() == values["f"]
        found = table["l"].value(row)
        assert (None if found is None else found.tolist()) == values["l"]
    assert table["t"].values.view("i8").tolist() == [0, 0, 5, 7] and table["d"].value(3).isoformat() == "1970-01-05"


def test_hive_folders_are_columns_and_others_are_not_opened(tmp_path, monkeypatch):
    for day, region in (("2026-01-01", "eu"), ("2026-01-02", "eu"), ("2026-01-02", "us")):
        folder = tmp_path / f"day={day}" / f"region={region}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"x": [1, 2]}), folder / "part.parquet")
    assert read(tmp_path).schema.names == ("x", "day", "region")
    opened = []
    was = DataFile.open
    monkeypatch.setattr(DataFile, "open", lambda file: opened.append(file.inside) or was(file))
    table = read(tmp_path, where={"region": ("us",)})
    assert set(opened) == {"day=2026-01-02/region=us/part.parquet"}
    assert [table["region"].value(row) for row in range(2)] == ["us", "us"]
    with pytest.raises(RequestError, match=r"no folder has the key 'regoin'.*did you mean 'region'"):
        read(tmp_path, where={"regoin": ("us",)})


def test_a_schema_that_changed_is_one_message(tmp_path):
    for number in range(3):
        values = pa.table({"x": pa.array([1], pa.int64() if number < 2 else pa.float64()), "y": [1]})
        pq.write_table(values, tmp_path / f"{number}.parquet")
    with pytest.raises(RequestError, match=r"'x' is i8 in \S*0\.parquet and f8 in \S*2\.parquet"):
        open_data(str(tmp_path))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "2.parquet")
    with pytest.raises(RequestError, match=r"column 'y' is in \S*0\.parquet and not in \S*2\.parquet"):
        open_data(str(tmp_path))


@pytest.mark.parametrize("cut", [1, 9, 100, 4000])
def test_a_torn_file_is_refused(tmp_path, cut):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.arange(2000)}), path, use_dictionary=False, compression="none")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(RequestError, match=r"a\.parquet"):
        read(path)


def test_flipped_bytes_end_in_rows_or_in_one_message(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.arange(300), "s": [f"w{i % 7}" for i in range(300)]}), path)
    good = path.read_bytes()
    draws = np.random.default_rng(0)
    for _ in range(150):
        bad = bytearray(good)
        bad[int(draws.integers(len(bad)))] ^= 1 << int(draws.integers(8))
        path.write_bytes(bytes(bad))
        try:
            assert len(read(path)) <= 300
        except RequestError as error:
            assert "a.parquet" in str(error)


def test_one_long_value_in_every_row_is_not_unpacked(tmp_path):
    path = tmp_path / "a.parquet"
    rows = pa.DictionaryArray.from_arrays(pa.array(np.zeros(50_000, np.int32)), pa.array(["x" * 100_000]))
    pq.write_table(pa.table({"s": rows}), path)
    assert path.stat().st_size < 20_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=r"column 's' unpack to .* the limit is"):
        read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def _zigzag(value):
    out, value = b"", value << 1
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def test_a_page_that_says_two_gigabytes_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.arange(10_000)}), path, use_dictionary=False, compression="snappy")
    good = path.read_bytes()
    place = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    reader = _Compact(good[place:])
    raw = dict(reader.whole_numbers())[2]
    found = good.index(b"\x15" + _zigzag(raw), place)
    path.write_bytes(good[:found] + b"\x15" + _zigzag(2**30) + good[found + 1 + len(_zigzag(raw)) :])
    with pytest.raises(RequestError, match=r"a\.parquet"):
        read(path)
