"""MosaicML's shards: rows are what was written, packed or not, and shards that lie are refused before memory is taken."""

import json
import pickle
import struct

import numpy as np
import pytest
import zstandard

from shoal.core.errors import RequestError
from shoal.data.formats.opening import open_data
from shoal.data.table import concat_tables

COLUMNS = {"id": ("int", 8), "text": ("str", None), "x": ("float32", 4), "image": ("png", None)}
COLUMNS |= {"pixels": ("ndarray:uint8:2,3", 6), "price": ("str_decimal", None)}


def shard_of(rows, columns=COLUMNS):
    """A shard as the format says: count, places, columns, rows."""
    names = sorted(columns)
    said = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26}
    said |= {"column_names": names, "column_encodings": [columns[name][0] for name in names]}
    said |= {"column_sizes": [columns[name][1] for name in names]}
    header = json.dumps(said, sort_keys=True).encode()
    bodies = []
    for row in rows:
        lengths = [len(row[name]) for name in names if columns[name][1] is None]
        bodies.append(struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(row[name] for name in names))
    places = np.cumsum([4 + 4 * (len(rows) + 1) + len(header), *map(len, bodies)]).astype("<u4")
    return struct.pack("<I", len(rows)) + places.tobytes() + header + b"".join(bodies)


def row(number):
    values = {"id": struct.pack("<q", number), "text": f"é{number}".encode(), "x": struct.pack("<f", number / 2)}
    return values | {"image": b"\x89PNG" * number, "pixels": bytes(range(6)), "price": f"{number}.25".encode()}


def write(folder, shards, *, packed=False):
    folder.mkdir()
    index = []
    for number, content in enumerate(shards):
        name = f"shard.{number:05}.mds"
        raw = {"basename": name, "bytes": len(content), "hashes": {}}
        zipped = zstandard.compress(content) if packed else None
        (folder / (f"{name}.zstd" if packed else name)).write_bytes(zipped if packed else content)
        zip_data = {"basename": f"{name}.zstd", "bytes": len(zipped), "hashes": {}} if packed else None
        index.append({"raw_data": raw, "zip_data": zip_data, "samples": 1, "format": "mds", "version": 2})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": index}))
    return folder


def read(folder, **options):
    opened = open_data(str(folder), **options)
    return opened, concat_tables(list(opened.tables()))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "zstd"])
def test_rows_are_what_was_written(tmp_path, packed):
    shards = [shard_of([row(number) for number in range(first, first + 3)]) for first in (0, 3)]
    opened, table = read(write(tmp_path / "data", shards, packed=packed))
    assert opened.format == "mds" and len(opened.files) == 2
    assert table["id"].values.tolist() == list(range(6)) and table["x"].values.tolist() == [n / 2 for n in range(6)]
    assert table["text"].value(4) == "é4" and table["image"].value(5) == b"\x89PNG" * 5
    assert table["pixels"].values.shape == (6, 2, 3) and table["price"].values.tolist() == [n + 0.25 for n in range(6)]


def torn(content):
    return content[:-3]


def longer(content):
    return content + b"x"


def many(content):
    return struct.pack("<I", 2**32 - 1) + content[4:]


def far(content):
    """The first row ends four gigabytes behind its begin."""
    return content[:8] + struct.pack("<I", 2**32 - 1) + content[12:]


def inner(content):
    """A value that says more bytes than its row has."""
    (begin,) = struct.unpack_from("<I", content, 4)
    return content[:begin] + struct.pack("<I", 2**31) + content[begin + 4 :]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (torn, "ends 3 bytes too early"),
        (longer, "has bytes behind its last row"),
        (many, "says that it has 4294967295 rows"),
        (far, "do not follow one another|says 4.0 GiB"),
        (inner, "row 1 has .* bytes, and its columns say"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_shards_that_lie_are_refused(tmp_path, harm, words, packed):
    folder = write(tmp_path / "data", [harm(shard_of([row(1), row(2)]))], packed=packed)
    with pytest.raises(RequestError, match=words):
        read(folder)


def test_pickled_columns_run_nothing(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    content = shard_of([{"x": pickle.dumps(Harm())}], {"x": ("pkl", None)})
    with pytest.raises(RequestError, match="column 'x' is 'pkl', and reading it would run what was written"):
        read(write(tmp_path / "data", [content]))
    assert not (tmp_path / "ran").exists()


def test_sizes_of_columns_are_those_of_their_types(tmp_path):
    content = shard_of([{"x": b"1234"}], {"x": ("ndarray:float32:1073741824,1073741824", 4)})
    with pytest.raises(RequestError, match=r"'x' is 'ndarray:float32:1073741824,1073741824' of .* bytes, and says 4"):
        read(write(tmp_path / "data", [content]))


def test_the_index_says_what_must_be_there(tmp_path):
    folder = write(tmp_path / "data", [shard_of([row(1)]), shard_of([row(2)])])
    second = folder / "shard.00001.mds"
    second.write_bytes(second.read_bytes() + b"x")
    with pytest.raises(RequestError, match=r"shard.00001.mds has \d+ bytes, and index.json says"):
        read(folder)
    second.unlink()
    with pytest.raises(RequestError, match=r"names the shard shard.00001.mds, and it is not there"):
        read(folder)
    (folder / "index.json").write_text("[]")
    with pytest.raises(RequestError, match="is no index of MDS shards"):
        read(folder)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "zstd"])
def test_any_altered_byte_gives_rows_or_one_message(tmp_path, packed):
    folder = write(tmp_path / "data", [shard_of([row(number) for number in range(4)])], packed=packed)
    path = next(folder.glob("shard*"))
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        try:
            read(folder)
        except RequestError as error:
            assert "shard.00000" in str(error)


def test_a_row_whose_text_is_none_is_named_or_left_out(tmp_path):
    folder = write(tmp_path / "data", [shard_of([row(1), row(2) | {"text": b"\xff"}, row(3)])])
    with pytest.raises(RequestError, match="row 2, column 'text': its text is no UTF-8"):
        read(folder)
