"""Images in folders: one row per file, the folder being its label, as ``torchvision.datasets.ImageFolder`` has it.

The columns are ``image``, the bytes of the file as they are, ``label``, the folder, and ``path``. Pixels are made by the
step ``image`` of ``data.prepare``, which needs Pillow.
"""

from collections.abc import Iterator, Sequence

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.formats.files import DataFile
from shoal.data.formats.options import ReadOptions
from shoal.data.formats.tarshards import bytes_column
from shoal.data.table import BYTES, TEXT, Field, Schema, Table, text_column

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SCHEMA = Schema(fields=(Field(name="image", kind=BYTES), Field(name="label", kind=TEXT), Field(name="path", kind=TEXT)))


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """The three columns."""
    return SCHEMA


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """One row."""
    yield from read_all([file], options)


def read_all(files: Sequence[DataFile], options: ReadOptions) -> Iterator[Table]:
    """The rows of many files, in tables of bounded size.

    Raises:
        RequestError: a file is in no folder, or too large.
    """
    chunk: list[DataFile] = []
    size = 0
    for file in files:
        if file.num_bytes > options.value_bytes:
            raise RequestError(
                f"{file.name} has {format_bytes(file.num_bytes)}, and an image at most {format_bytes(options.value_bytes)}"
            )
        if "/" not in file.inside:
            raise RequestError(
                f"{file.name} is in no folder that says its label; sort the images into folders, one per label"
            )
        chunk.append(file)
        size += file.num_bytes
        if len(chunk) >= options.batch_rows or size >= options.batch_bytes:
            yield _table(chunk)
            chunk, size = [], 0
    if chunk:
        yield _table(chunk)


def _table(files: Sequence[DataFile]) -> Table:
    contents: list[bytes | None] = []
    for file in files:
        with file.open() as opened:
            contents.append(opened.read(file.num_bytes))
    labels = text_column("label", [file.inside.split("/")[-2] for file in files])
    return Table.of(
        [bytes_column(SCHEMA.fields[0], contents), labels, text_column("path", [file.inside for file in files])]
    )
