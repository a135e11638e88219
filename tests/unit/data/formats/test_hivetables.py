"""Tables of a Hive metastore as files; the metastore itself runs in tests/multiproc/test_remote_storage.py."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.core.errors import RequestError
from shoal.data.formats import opening
from shoal.data.formats.opening import open_data
from shoal.data.formats.options import ReadOptions
from shoal.data.storage.hive import HiveColumn, HivePartition, HiveTable
from shoal.data.table import concat_tables

ADDRESS = "hive://metastore:9083/shop.sales"


def columns(**kinds):
    return tuple(HiveColumn(name=name, kind=kind) for name, kind in kinds.items())


def table_of(folder, **said):
    values = {
        "location": f"file://{folder}",
        "columns": columns(id="bigint", text="string"),
        "partition_columns": (),
        "partitions": (),
        "format": "parquet",
        "delimiter": None,
    }
    return HiveTable(**(values | said))


def read(monkeypatch, table, where=None, **options):
    asked = []
    monkeypatch.setattr(opening, "resolve_hive", lambda address, settings: asked.append(address) or table)
    opened = open_data(ADDRESS, where=where, options=ReadOptions(**options))
    assert asked == [ADDRESS]
    return opened, concat_tables(list(opened.tables()))


def test_partitions_are_read_where_the_metastore_says_with_its_types(tmp_path, monkeypatch):
    # One of them lies elsewhere, one has no folder yet, and no folder is called key=value.
    places = {"2026-11-01": tmp_path / "a", "2026-11-02": tmp_path / "far" / "b", "2026-11-03": tmp_path / "nothing"}
    for number, place in enumerate(list(places.values())[:2]):
        place.mkdir(parents=True)
        pq.write_table(pa.table({"id": [number], "text": ["x"]}), place / "000000_0")
    parts = tuple(HivePartition(values=(day, "07"), location=f"file://{place}") for day, place in places.items())
    table = table_of(tmp_path, partition_columns=columns(day="date", shop="varchar(8)"), partitions=parts)
    opened, rows = read(monkeypatch, table)
    assert opened.format == "parquet" and opened.schema.names == ("id", "text", "day", "shop")
    assert [str(rows["day"].value(row))[:10] for row in range(2)] == ["2026-11-01", "2026-11-02"]
    assert [rows["shop"].value(row) for row in range(2)] == ["07", "07"], (
        "a text stays one, though it looks like a number"
    )
    assert rows["id"].values.tolist() == [0, 1]
    _, pruned = read(monkeypatch, table, where={"day": ("2026-11-02",)})
    assert pruned["id"].values.tolist() == [1]
    with pytest.raises(RequestError, match="has 1 partitions and no file in them"):
        read(monkeypatch, table_of(tmp_path, partition_columns=table.partition_columns, partitions=parts[2:]))


def test_a_table_of_text_has_no_header_and_hives_own_marks(tmp_path, monkeypatch):
    (tmp_path / "000000_0").write_text('1\x01it\'s "5"\n2\x01\\N\n')
    _, rows = read(monkeypatch, table_of(tmp_path, format="csv"))
    assert [rows["text"].value(row) for row in range(2)] == ['it\'s "5"', None] and rows["id"].values.tolist() == [1, 2]
    (tmp_path / "000000_0").write_text('id|text\n1|"a|b"\n')
    told = {"format": "csv", "delimiter": "|", "skip_lines": 1, "quotes": True}
    _, rows = read(monkeypatch, table_of(tmp_path, **told), types={"id": "f4"})
    assert rows["text"].value(0) == "a|b" and rows.schema["id"].kind == "<f4"
    (tmp_path / "000000_0").write_text("1|a|b\n")
    with pytest.raises(RequestError, match="row 0: the row has 3 fields and the table 2"):
        read(monkeypatch, table_of(tmp_path, format="csv", delimiter="|"))


def test_a_format_that_is_not_read_is_said_with_the_way_out(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match=r"sales has files of the format orc, and read are parquet, csv, jsonl"):
        read(monkeypatch, table_of(tmp_path, format="orc"))
