"""Files of text: one row per line, in one column called ``text``. Empty lines are no rows."""

from collections.abc import Iterator

from shoal.data.formats.files import DataFile
from shoal.data.formats.lines import iter_lines
from shoal.data.formats.options import ReadOptions
from shoal.data.table import TEXT, Field, Schema, Table, text_column


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """The one column."""
    return Schema(fields=(Field(name="text", kind=TEXT),))


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """The lines, in tables of bounded size."""
    chunk: list[str] = []
    size = 0
    for line in iter_lines(file, options.value_bytes):
        text = line.rstrip("\r\n")
        if not text:
            continue
        chunk.append(text)
        size += len(text) + 64
        if len(chunk) >= options.batch_rows or size >= options.batch_bytes:
            yield Table.of([text_column("text", chunk)])
            chunk, size = [], 0
    if chunk:
        yield Table.of([text_column("text", chunk)])
