"""Parquet files, read a batch at a time within bounded memory, after their page headers have been looked at."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.formats.arrowvalues import column_of, field_of, require_arrow
from shoal.data.formats.files import DataFile
from shoal.data.formats.options import ReadOptions
from shoal.data.formats.parquetpages import BrokenPage, check_pages
from shoal.data.table import BYTES, TEXT, Schema, Table

_FOOTER_BYTES = 1 << 26
_PAGE_BYTES = 1 << 28
_ROW_BYTES = 1 << 10


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """The columns of the footer.

    Raises:
        RequestError: it is no whole Parquet file, or has a column that is none.
    """
    with file.open() as opened, _naming(file):
        found = _open(file, opened, ()).schema_arrow
        fields = tuple(
            field_of(field.name, field.type, where=file.name) for field in found if options.wants(field.name)
        )
        return Schema(fields=fields)


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """The rows, in tables of bounded size.

    Raises:
        RequestError: the file is torn, or asks for more memory than the bounds.
    """
    names = [field.name for field in schema.fields]
    with file.open() as opened, _naming(file):
        encoded = tuple(field.name for field in schema.fields if field.kind in (TEXT, BYTES))
        parquet = _open(file, opened, encoded)
        check_pages(opened, parquet.metadata, columns=frozenset(names), most_bytes=_PAGE_BYTES)
        rows = max(1, min(options.batch_rows, options.batch_bytes // _ROW_BYTES))
        count = 0
        for batch in parquet.iter_batches(batch_size=rows, columns=names, use_threads=False):
            columns = tuple(
                column_of(field, batch.column(field.name), where=file.name, most_bytes=4 * options.batch_bytes)
                for field in schema.fields
            )
            count += batch.num_rows
            yield Table(columns=columns, num_rows=batch.num_rows)
        if count != parquet.metadata.num_rows:
            raise RequestError(
                f"{file.name} says {parquet.metadata.num_rows} rows and has {count}; the file is torn or forged: write it again"
            )


def _open(file: DataFile, opened: BinaryIO, encoded: tuple[str, ...]) -> Any:
    require_arrow()
    import pyarrow.parquet as parquet

    size = opened.seek(0, 2)
    opened.seek(max(0, size - 8))
    tail = opened.read(8)
    length = int.from_bytes(tail[:4], "little")
    if size < 12 or tail[4:] not in (b"PAR1", b"PARE"):
        raise RequestError(
            f"{file.name} is no whole Parquet file: it does not end as one; fetch it again, or is data.format another?"
        )
    if length > min(_FOOTER_BYTES, size - 12):
        raise RequestError(
            f"{file.name} says a footer of {format_bytes(length)} in a file of {format_bytes(size)}; it is torn or forged"
        )
    opened.seek(0)
    return parquet.ParquetFile(
        opened,
        read_dictionary=list(encoded) or None,
        buffer_size=1 << 20,
        pre_buffer=False,
        thrift_string_size_limit=_FOOTER_BYTES,
        thrift_container_size_limit=1 << 22,
        page_checksum_verification=True,
    )


@contextmanager
def _naming(file: DataFile) -> Iterator[None]:
    """Whatever pyarrow says of a file that is broken, with its name."""
    pa = require_arrow()
    try:
        yield
    except BrokenPage as error:
        raise RequestError(f"{file.name}: {error}; the file is torn or forged: write it again") from error
    except (pa.ArrowException, OSError, OverflowError, KeyError, UnicodeDecodeError) as error:
        raise RequestError(f"{file.name} is no whole Parquet file: {str(error)[:300]}; write it again") from error
