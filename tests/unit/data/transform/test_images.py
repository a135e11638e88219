"""Files of images become pixels; those that are torn, lie about their size or are no images are refused by row."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.data.build import build_splits
from shoal.data.config import StoreConfig, TableConfig
from shoal.data.prepare import open_rows, prepare_rows
from shoal.data.store.writer import build_store
from shoal.data.table import BYTES, Column, Field, Table, text_column
from shoal.data.transform import images
from shoal.data.transform.config import ImageConfig


def png(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def table_of(*files):
    offsets = np.cumsum([0, *map(len, files)]).astype(np.int64)
    values = np.frombuffer(b"".join(files), np.uint8)
    return Table.of([Column(field=Field(name="image", kind=BYTES), values=values, offsets=offsets)])


def config_of(size, channels=3):
    return ImageConfig(step="image", columns=("image",), size=size, channels=channels)


def forged(width, height):
    """A PNG whose header says what it likes."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def test_pixels_of_the_same_size_are_those_of_the_file():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    found = images.apply(table_of(png(pixels), png(pixels[::-1], "PPM")), config_of((5, 7)))["image"].values
    assert found.shape == (2, 3, 5, 7) and found.dtype == np.float32
    assert np.array_equal(found[0], pixels.transpose(2, 0, 1) / np.float32(255)) and found.max() <= 1
    assert np.array_equal(found[1], found[0][:, ::-1])


def test_grey_and_other_sizes():
    flat = np.full((8, 4, 3), 51, np.uint8)
    found = images.apply(table_of(png(flat), png(np.full((2, 2), 255, np.uint8))), config_of((3, 6), 1))["image"].values
    assert found.shape == (2, 1, 3, 6) and np.allclose(found[0], 0.2) and (found[1] == 1).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (forged(30_000, 30_000), "row 2"),
        (forged(9_000, 9_000), "row 2: it says that it has 9000 x 9000 pixels"),
        (
            png(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))[:900],
            "row 2: it is no whole image",
        ),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "row 2: it is no whole image"),
        (b"", "row 2: it is no whole image"),
    ],
    ids=["bomb", "large", "torn", "program", "empty"],
)
def test_what_is_no_image_is_refused_with_its_row(content, words):
    good = png(np.zeros((2, 2, 3), np.uint8))
    with pytest.raises(RequestError, match=words):
        images.apply(table_of(good, content), config_of((2, 2)))


def test_a_column_of_text_is_refused():
    with pytest.raises(RequestError, match="column 'image' is text, and the step needs the bytes"):
        images.apply(Table.of([text_column("image", ["a.png"])]), config_of((2, 2)))


def test_folders_of_images_are_classes(tmp_path):
    draws = np.random.default_rng(0)
    for row in range(30):
        folder = tmp_path / "pets" / ("cat", "dog")[row % 2]
        folder.mkdir(parents=True, exist_ok=True)
        content = png(draws.integers(0, 256, (6 + row % 3, 6, 3), dtype=np.uint8))
        (folder / f"{row}.png").write_bytes(content)
    given = {"source": "table", "path": str(tmp_path / "pets"), "inputs": ["image"], "target": "label"}
    given["prepare"] = [{"step": "image", "columns": ["image"], "size": [8, 8]}]
    rows = prepare_rows(validate(TableConfig, given, origin="a.toml"))
    assert rows.spec.features == (3, 8, 8) and rows.space.names == ("cat", "dog") and rows.spec.kind == "classes"
    assert rows.splits["train"].inputs[""].dtype == np.float32
    # In a store they are files as well, and become pixels when a batch is read.
    build_store(list(open_rows(validate(TableConfig, given, origin="a.toml")).tables()), str(tmp_path / "store"))
    shares = {"validation": 0, "test": 0}
    stored = {**given, **shares, "source": "store", "path": str(tmp_path / "store")}
    ours = build_splits(validate(StoreConfig, stored, origin="a.toml"), 0)
    theirs = build_splits(validate(TableConfig, {**given, **shares}, origin="a.toml"), 0)
    own, other = (splits.train.collate([3, 29, 0]) for splits in (ours, theirs))
    assert torch.equal(own.inputs[0], other.inputs[0]) and torch.equal(own.targets, other.targets)
    assert ours.spec == theirs.spec
