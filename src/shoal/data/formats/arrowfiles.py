"""Arrow files, as Hugging Face ``datasets`` saves them: a folder of ``.arrow`` streams with a ``state.json`` that names them.

The library itself is not needed: its columns are Arrow's. Images and audio in them are structs of bytes and path, of which
the bytes are taken.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.formats.arrowvalues import column_of, field_of, require_arrow
from shoal.data.formats.files import DataFile
from shoal.data.formats.options import ReadOptions
from shoal.data.table import Schema, Table

_MOST_MESSAGE = 1 << 30


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """The columns of the stream's first message.

    Raises:
        RequestError: it is no Arrow file, or has a column that is none.
    """
    with _stream(file) as stream:
        return Schema(
            fields=tuple(
                field_of(field.name, _flat_type(field.type), where=file.name)
                for field in stream.schema
                if options.wants(field.name)
            )
        )


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """The rows, in tables of bounded size.

    Raises:
        RequestError: the file is torn.
    """
    with _stream(file) as stream:
        for batch in stream:
            batch.validate(full=True)
            for start in range(0, batch.num_rows, options.batch_rows):
                part = batch.slice(start, options.batch_rows)
                columns = tuple(
                    column_of(
                        field, _flat(part.column(field.name)), where=file.name, most_bytes=4 * options.batch_bytes
                    )
                    for field in schema.fields
                )
                yield Table(columns=columns, num_rows=part.num_rows)


def _flat_type(kind: Any) -> Any:
    pa = require_arrow()
    if pa.types.is_struct(kind) and {kind.field(place).name for place in range(kind.num_fields)} == {"bytes", "path"}:
        return kind.field("bytes").type
    return kind


def _flat(array: Any) -> Any:
    return array.field("bytes") if require_arrow().types.is_struct(array.type) else array


@contextmanager
def _stream(file: DataFile) -> Iterator[Any]:
    pa = require_arrow()
    import pyarrow.ipc as ipc

    if file.num_bytes < 8:
        raise RequestError(f"{file.name} has {file.num_bytes} bytes and is no Arrow file")
    try:
        with file.open() as opened:
            if opened.read(6) == b"ARROW1":
                opened.seek(0)
                reader = ipc.open_file(opened)
                yield _Batches(reader)
                return
            opened.seek(0)
            head = opened.read(8)
            length = int.from_bytes(head[4:] if head[:4] == b"\xff\xff\xff\xff" else head[:4], "little")
            if length > min(_MOST_MESSAGE, file.num_bytes):
                raise RequestError(
                    f"{file.name} says a message of {format_bytes(length)} in {format_bytes(file.num_bytes)}; it is torn or "
                    f"forged"
                )
            opened.seek(0)
            yield ipc.open_stream(opened)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise RequestError(f"{file.name} is no whole Arrow file: {str(error)[:300]}; write it again") from error


class _Batches:
    """A file with a footer, read as the stream that it also is."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.schema = reader.schema

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._reader.num_record_batches):
            yield self._reader.get_batch(number)
