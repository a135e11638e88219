"""Formats are guessed by names, and every small format gives rows."""

import numpy as np
import pyarrow as pa
import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.data.config import StoreConfig, TableConfig
from shoal.data.formats.opening import open_data, open_tables
from shoal.data.formats.options import ReadOptions
from shoal.data.prepare import open_rows
from shoal.data.sources.storefile import open_store_data
from shoal.data.storage.memory import open_memory
from shoal.data.storage.protocol import Unreachable
from shoal.data.table import concat_tables
from support.data.webserver import Web, serving


def test_text_and_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\r\n")
    _, tables = open_tables(str(tmp_path / "a.txt"))
    assert [next(tables)["text"].value(row) for row in (0,)] == ["one"]
    np.save(tmp_path / "b.npy", np.arange(23, dtype=np.uint16))
    opened = open_data(str(tmp_path / "b.npy"), options=ReadOptions(sequence=5, batch_rows=3))
    rows = concat_tables(list(opened.tables()))["tokens"].values
    assert rows.tolist() == [list(range(start, start + 6)) for start in (0, 5, 10, 15)]
    (tmp_path / "b.npy").write_bytes((tmp_path / "b.npy").read_bytes()[:-3])
    with pytest.raises(RequestError, match="the file is torn"):
        open_data(str(tmp_path / "b.npy"), options=ReadOptions(sequence=5))


def test_a_saved_hugging_face_dataset(tmp_path):
    table = pa.table({"text": ["a", None], "image": pa.array([{"bytes": b"\x01", "path": "p"}] * 2)})
    with (
        pa.OSFile(str(tmp_path / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    opened = open_data(str(tmp_path))
    found = concat_tables(list(opened.tables()))
    assert opened.format == "arrow" and found["text"].value(1) is None and found["image"].value(0) == b"\x01"
    path = tmp_path / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RequestError, match="arrow"):
        list(open_data(str(tmp_path)).tables())


def test_images_in_folders(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.png").write_bytes(label.encode())
    found = concat_tables(list(open_data(str(tmp_path)).tables()))
    assert [found["label"].value(row) for row in range(2)] == ["cat", "dog"] and found["image"].value(1) == b"dog"


def test_any_storage_is_read_by_ranges():
    storage = open_memory("formats-opening")
    storage.replace("d/a.csv", b"x\n1\n2\n")
    storage.replace("d/b.csv", b"x\n3\n")
    _, tables = open_tables("memory://formats-opening/d")
    assert [value for table in tables for value in table["x"].values.tolist()] == [1, 2, 3]


def test_columns_and_types(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,a\n")
    opened = open_data(str(tmp_path / "a.csv"), options=ReadOptions(columns=("y", "x"), types={"x": "f4"}))
    assert [(field.name, field.kind) for field in opened.schema.fields] == [("y", "text"), ("x", "<f4")]
    for wrong, said in (({"z": "f4"}, "no column 'z'"), ({"x": "O"}, "there is none"), ({"x": "f99"}, "there is none")):
        with pytest.raises(RequestError, match=said):
            open_data(str(tmp_path / "a.csv"), options=ReadOptions(types=wrong))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "there is no such file"),
        (("a.xyz",), "says no format"),
        (("a.csv", "b.parquet"), "is csv and .* is parquet"),
    ],
)
def test_what_cannot_be_guessed(tmp_path, names, said):
    for name in names:
        (tmp_path / name).write_text("x\n1\n")
    with pytest.raises(RequestError, match=said):
        open_data(str(tmp_path))


def test_text_in_one_file_and_numbers_in_the_other(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x\n1.5\n")
    assert open_data(str(tmp_path)).schema["x"].kind == "<f8"
    (tmp_path / "b.csv").write_text("x\nhello\n")
    with pytest.raises(RequestError, match=r"'x' is i8 in \S*a\.csv and text in \S*b\.csv; .*data\.types"):
        open_data(str(tmp_path))


def test_a_recipe_says_how_its_storage_is_asked():
    config = {"source": "table", "path": "", "inputs": ["x"], "target": "y", "storage": {"retries": 0, "backoff": 0}}
    with serving(Web()) as web:
        web.files = {"a.csv": b"x,y\n" + b"1,0\n2,1\n" * 50}
        config["path"] = f"{web.address}/a.csv"
        web.fail("500")
        with pytest.raises(Unreachable, match="1 times in a row"):
            open_rows(validate(TableConfig, config, origin="test"))
        web.fail("500")
        config["storage"]["retries"] = 1
        opened = open_rows(validate(TableConfig, config, origin="test"))
        assert opened.schema.names == ("x", "y")
        web.fail("500")
        with pytest.raises(Unreachable, match="1 times in a row"):
            open_store_data(validate(StoreConfig, STORE | {"path": f"{web.address}/s"}, origin="test"))


STORE = {"source": "store", "version": 1, "target": "y", "storage": {"retries": 0}}
