"""MosaicML's streaming shards (MDS, version 2): every shard says its rows, their places and its columns itself.

    rows: u32 | places: u32 of each row and of the end | columns: JSON | rows: a u32 for each length that varies, then the values

A shard is read from front to back, packed by zstd or gzip or not, and a row at a time, so that no number in it asks for more
memory than a row may have. ``index.json``, where it lies beside them, says which shards there must be and how long. Pickled
columns are refused: reading them runs whatever was written.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.formats.files import DataFile
from shoal.data.formats.kinds import FLOAT, INTEGER, Unfit, column_of_texts
from shoal.data.formats.options import ReadOptions
from shoal.data.formats.tarshards import bytes_column
from shoal.data.table import BYTES, TEXT, Column, Field, Schema, Table

SUFFIXES = (".mds", ".zstd")
INDEX = "index.json"
_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_KINDS = {"int": INTEGER} | {name: np.dtype(name).newbyteorder("<").str for name in _NUMBERS}
_VARYING = {"str": TEXT, "json": TEXT, "bytes": BYTES, "jpeg": BYTES, "png": BYTES}
_WRITTEN_OUT = {"str_int": INTEGER, "str_float": FLOAT, "str_decimal": FLOAT}
_MAX_ROWS = 1 << 24
_MAX_HEADER = 1 << 20
_MAX_WINDOW = 1 << 27


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """One column as a shard has it."""

    field: Field
    size: int | None
    """Bytes of a value; None where they vary."""
    is_written_out: bool
    """A number that is written as text."""


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """The columns that the shard names.

    Raises:
        RequestError: the file is no shard, or a column cannot be read safely.
    """
    with _open(file) as opened:
        _, columns = _read_header(opened, file)
    return Schema(fields=tuple(column.field for column in columns))


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """The rows, in tables of bounded size.

    Raises:
        RequestError: the shard is torn, or a row is longer than a value may be.
    """
    with _open(file) as opened:
        places, columns = _read_header(opened, file)
        chunk: list[list[bytes]] = []
        size = 0
        for number, length in enumerate(np.diff(places).tolist(), 1):
            if length > options.value_bytes:
                raise RequestError(
                    f"{file.name}: row {number} says {format_bytes(length)}, and a row has at most "
                    f"{format_bytes(options.value_bytes)}"
                )
            row = _cut(_take(opened, length, file), columns, f"{file.name}: row {number}")
            problem = _problem(row, columns)
            if problem is not None:
                options.rejects.add(file.name, number, *problem)
                continue
            chunk.append(row)
            size += length
            if len(chunk) >= options.batch_rows or size >= options.batch_bytes:
                yield _table(chunk, columns, schema)
                chunk, size = [], 0
        if _read(opened, 1, file):
            raise RequestError(f"{file.name} has bytes behind its last row; fetch it again, or write it again")
        if chunk:
            yield _table(chunk, columns, schema)


def check_index(files: Sequence[DataFile], shards: Sequence[DataFile]) -> None:
    """Hold the shards to ``index.json``, where it is there.

    Args:
        files: all files of the folder.
        shards: those that are read.

    Raises:
        RequestError: a shard is missing, has another length, or the index is none.
    """
    by_name = {file.inside: file for file in shards}
    for index in (file for file in files if file.inside.rpartition("/")[2] == INDEX):
        if index.num_bytes > 64 * _MAX_HEADER:
            raise RequestError(
                f"{index.name} has {format_bytes(index.num_bytes)}, which is no index of shards; remove it"
            )
        folder = index.inside.removesuffix(INDEX)
        try:
            with index.open() as opened:
                listed = json.loads(opened.read(index.num_bytes))["shards"]
            wanted = [(shard["zip_data"] or shard["raw_data"], shard["raw_data"]) for shard in listed]
            expected = [[(folder + str(one["basename"]), int(one["bytes"])) for one in pair] for pair in wanted]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestError(f"{index.name} is no index of MDS shards ({error}); write it again") from error
        for choices in expected:
            there = [(by_name[name], size) for name, size in choices if name in by_name]
            if not there:
                raise RequestError(f"{index.name} names the shard {choices[0][0]}, and it is not there; fetch it again")
            for file, size in there:
                if file.num_bytes != size:
                    raise RequestError(
                        f"{file.name} has {file.num_bytes} bytes, and {INDEX} says {size}; fetch it again"
                    )


def _open(file: DataFile) -> BinaryIO:
    if file.suffixes[-1:] != [".zstd"]:
        return file.open_text()
    try:
        import zstandard
    except ImportError as error:
        raise RequestError(f"{file.name} needs the package zstandard: pip install 'shoal[data]'") from error
    found: Any = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(file.open(), closefd=True)
    return found  # type: ignore[no-any-return]


def _read(opened: BinaryIO, most: int, file: DataFile) -> bytes:
    try:
        return opened.read(most)
    except Exception as error:
        # The package for zstd is there only where a shard needs it, and its error is no kind of any other.
        if not isinstance(error, OSError | EOFError | zlib.error) and type(error).__name__ != "ZstdError":
            raise
        raise RequestError(f"{file.name} cannot be unpacked: {error}; fetch it again, or write it again") from error


def _take(opened: BinaryIO, length: int, file: DataFile) -> bytes:
    """So many bytes.

    Raises:
        RequestError: the shard ends before, or cannot be unpacked.
    """
    parts = []
    left = length
    while left and (part := _read(opened, left, file)):
        parts.append(part)
        left -= len(part)
    if left:
        raise RequestError(f"{file.name} ends {left} bytes too early; fetch it again, or write it again")
    return b"".join(parts)


def _read_header(opened: BinaryIO, file: DataFile) -> tuple[Any, tuple[_Stored, ...]]:
    """Places of the rows, and the columns."""
    (num_rows,) = struct.unpack("<I", _take(opened, 4, file))
    if num_rows > _MAX_ROWS:
        raise RequestError(
            f"{file.name} says that it has {num_rows} rows, and a shard has at most {_MAX_ROWS}; refused"
        )
    places = np.frombuffer(_take(opened, 4 * (num_rows + 1), file), "<u4").astype(np.int64)
    header = int(places[0]) - 4 * (num_rows + 2)
    if not 2 <= header <= _MAX_HEADER or (np.diff(places) < 0).any():
        raise RequestError(
            f"{file.name} is no MDS shard: its rows begin at {int(places[0])}, or do not follow one another"
        )
    try:
        said = json.loads(_take(opened, header, file))
        if said["version"] != 2 or said["format"] != "mds":
            raise ValueError(f"format {said['format']!r}, version {said['version']!r}")
        parts = list(zip(said["column_names"], said["column_encodings"], said["column_sizes"], strict=True))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(f"{file.name} is no MDS shard of version 2 ({error})") from error
    return places, tuple(_stored(str(name), str(encoding), size, file) for name, encoding, size in parts)


def _stored(name: str, encoding: str, size: Any, file: DataFile) -> _Stored:
    kind, _, detail = encoding.partition(":")
    field, written_out = Field(name=name, kind=_VARYING.get(kind, TEXT)), kind in _WRITTEN_OUT
    if kind in _KINDS:
        field = Field(name=name, kind=_KINDS[kind])
    elif written_out:
        field = Field(name=name, kind=_WRITTEN_OUT[kind])
    elif kind == "ndarray" and detail.partition(":")[2]:
        element, _, shape = detail.partition(":")
        lengths = tuple(int(each) for each in shape.split(",") if each.strip().isdecimal())
        if element not in _KINDS or not lengths or min(lengths) < 1:
            raise RequestError(f"{file.name}: column {name!r} is {encoding[:80]!r}, which is no array")
        field = Field(name=name, kind=_KINDS[element], shape=lengths)
    elif kind not in _VARYING:
        why = "reading it would run what was written" if kind == "pkl" else "its values have no one type and shape"
        raise RequestError(
            f"{file.name}: column {name!r} is {encoding[:80]!r}, and {why}; write it as numbers, str, json, bytes, jpeg, png or "
            "ndarray:DTYPE:SHAPE"
        )
    is_fixed = not field.is_ragged and not written_out
    wanted = field.dtype.itemsize * int(np.prod([1, *field.shape], dtype=object)) if is_fixed else None
    if size != wanted:
        raise RequestError(
            f"{file.name}: column {name!r} is {encoding[:80]!r} of {wanted or 'any'} bytes, and says {size}"
        )
    return _Stored(field=field, size=wanted, is_written_out=written_out)


def _cut(row: bytes, columns: Sequence[_Stored], where: str) -> list[bytes]:
    """The values of a row."""
    varying = sum(column.size is None for column in columns)
    if len(row) < 4 * varying:
        raise RequestError(f"{where} has {len(row)} bytes, and its lengths alone need {4 * varying}")
    lengths = iter(struct.unpack_from(f"<{varying}I", row))
    values, at = [], 4 * varying
    for column in columns:
        end = at + (next(lengths) if column.size is None else column.size)
        values.append(row[at:end])
        at = end
    if at != len(row):
        raise RequestError(f"{where} has {len(row)} bytes, and its columns say {at}")
    return values


def _problem(row: Sequence[bytes], columns: Sequence[_Stored]) -> tuple[str, str] | None:
    """The first column that does not fit, and why."""
    for value, column in zip(row, columns, strict=True):
        if column.field.kind != TEXT and not column.is_written_out:
            continue
        try:
            text = value.decode()
            if column.is_written_out:
                column_of_texts(column.field.name, [text], column.field.kind, ())
        except UnicodeDecodeError:
            return column.field.name, "its text is no UTF-8"
        except Unfit as unfit:
            return column.field.name, unfit.why
    return None


def _table(rows: Sequence[Sequence[bytes]], columns: Sequence[_Stored], schema: Schema) -> Table:
    made = {}
    for place, column in enumerate(columns):
        own = column.field
        if own.name not in schema.names:
            continue
        values = [row[place] for row in rows]
        if column.is_written_out:
            made[own.name] = column_of_texts(own.name, [value.decode() for value in values], own.kind, ())
        elif own.is_ragged:
            made[own.name] = bytes_column(own, list(values))
        else:
            flat = np.frombuffer(b"".join(values), own.dtype).reshape(len(rows), *own.shape)
            made[own.name] = Column(field=own, values=flat)
    return Table(columns=tuple(made[field.name] for field in schema.fields), num_rows=len(rows))
