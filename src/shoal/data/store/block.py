"""A block: some rows of a table as one immutable file, which is read by mapping it into memory.

    64 bytes     what it is: magic, codec, rows, lengths, digest of the schema
    16 a column  number of elements, and whether values are missing
    payload      per column: bits of validity, offsets where values have many lengths, values; each begins at a multiple of 64

Where each array lies follows from the schema, the number of rows and the number of elements; no length is read twice and no place
is read at all, so that there is nothing for a forged header to point at. A compressed payload is one zstd frame whose length must
be the one that these numbers give, before anything of it is unpacked.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.store.errors import BrokenFile
from shoal.data.store.schema import digest_schema
from shoal.data.table import Column, Field, Schema, Table

MAGIC = b"SHOALBLK"
ALIGNMENT = 64
MAX_RAW_BYTES = 2**30
"""A block that unpacks to more is neither written nor read. Blocks of many rows stay far below."""
_PREAMBLE = struct.Struct("<8sHHIQQQ16s8x")
_COLUMN = struct.Struct("<QQ")
_VERSION = 1
_CODECS = {"none": 0, "zstd": 1}
_ZSTD_LEVEL = 3


@dataclass(frozen=True, kw_only=True)
class BlockHeader:
    """What the first bytes of a block say, checked against each other."""

    codec: str
    num_rows: int
    stored_bytes: int
    """Of the payload, as it lies in the file."""
    raw_bytes: int
    """Of the payload, unpacked."""
    schema_digest: bytes
    elements: tuple[int, ...]
    has_missing: tuple[bool, ...]
    payload_start: int


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where the arrays of one column begin in the payload."""

    valid: int | None
    offsets: int | None
    values: int


def digest_block(data: Any) -> str:
    """The digest of a block's file, as the manifest has it and as its name says."""
    return xxhash.xxh3_128(data).hexdigest()


def encode_block(table: Table, *, codec: str = "none") -> bytes:
    """The file of these rows; the same rows give the same bytes.

    Raises:
        RequestError: they are more than a block may hold, or zstandard is missing.
    """
    schema, num_rows = table.schema, len(table)
    assert num_rows, "a block has at least one row"
    elements = tuple(
        len(column.values) if column.offsets is not None else num_rows * _items(column.field)
        for column in table.columns
    )
    # A mask without a False is no missing value: the same rows give the same bytes.
    missing = tuple(column.valid is not None and not bool(column.valid.all()) for column in table.columns)
    places, raw_bytes = _lay_out(schema, num_rows, elements, missing)
    if raw_bytes > MAX_RAW_BYTES:
        raise RequestError(
            f"{num_rows} rows take {format_bytes(raw_bytes)}, and a block holds at most {format_bytes(MAX_RAW_BYTES)}; "
            "cut the values, or keep them in files and their names in the store"
        )
    head = 64 + _pad(_COLUMN.size * len(schema.fields))
    file = np.zeros(head + raw_bytes, dtype=np.uint8)
    payload = file[head:]
    for column, place, is_missing in zip(table.columns, places, missing, strict=True):
        if is_missing:
            assert column.valid is not None and place.valid is not None
            _put(payload, place.valid, np.packbits(column.valid, bitorder="little"))
        if column.offsets is not None:
            assert place.offsets is not None
            _put(payload, place.offsets, np.asarray(column.offsets, dtype=np.int64))
        _put(payload, place.values, np.ascontiguousarray(column.values, dtype=column.field.dtype))
    stored = file if codec == "none" else _compress(payload)
    stored_bytes = raw_bytes if codec == "none" else len(stored)
    start = _PREAMBLE.pack(
        MAGIC,
        _VERSION,
        _CODECS[codec],
        len(schema.fields),
        num_rows,
        stored_bytes,
        raw_bytes,
        digest_schema(schema),
    )
    columns = b"".join(_COLUMN.pack(count, int(gaps)) for count, gaps in zip(elements, missing, strict=True))
    begin = (start + columns).ljust(head, b"\0")
    if codec != "none":
        return begin + bytes(stored)
    file[:head] = np.frombuffer(begin, dtype=np.uint8)
    return file.tobytes()


def read_header(data: memoryview, schema: Schema, *, file: str) -> BlockHeader:
    """The header of a block, every number of it checked against the file and the schema. Nothing is allocated.

    Raises:
        BrokenFile: it is no block of this schema, or its numbers do not agree.
    """
    if len(data) < _PREAMBLE.size:
        raise BrokenFile(file, f"it has {len(data)} bytes, fewer than a header; it is torn")
    magic, version, codec, num_columns, rows, stored, raw, digest = _PREAMBLE.unpack_from(data)
    if magic != MAGIC:
        raise BrokenFile(file, "it is no block of a store")
    if version != _VERSION:
        raise BrokenFile(file, f"it has the format {version} and this program reads {_VERSION}")
    names = {number: name for name, number in _CODECS.items()}
    if codec not in names:
        raise BrokenFile(file, f"it has the codec {codec}, and there are {len(_CODECS)}")
    if num_columns != len(schema.fields) or digest != digest_schema(schema):
        raise BrokenFile(file, "it has other columns than the manifest says")
    head = _PREAMBLE.size + _pad(_COLUMN.size * num_columns)
    if head + stored != len(data):
        raise BrokenFile(file, f"it has {len(data)} bytes and its header says {head + stored}")
    if not rows or raw > MAX_RAW_BYTES:
        raise BrokenFile(file, f"its header says {rows} rows in {raw} bytes; a block holds up to {MAX_RAW_BYTES}")
    pairs = [_COLUMN.unpack_from(data, _PREAMBLE.size + _COLUMN.size * place) for place in range(num_columns)]
    elements = tuple(count for count, _ in pairs)
    missing = tuple(flag == 1 for _, flag in pairs)
    wrong = [
        field.name
        for field, (count, flag) in zip(schema.fields, pairs, strict=True)
        if flag > 1 or (not field.is_ragged and count != rows * _items(field))
    ]
    if wrong:
        raise BrokenFile(file, f"its header gives column {wrong[0]!r} a length that {rows} rows do not have")
    _, expected = _lay_out(schema, rows, elements, missing)
    if raw != expected or (codec == 0 and stored != raw):
        raise BrokenFile(file, f"its header says {raw} bytes, and its columns take {expected}")
    return BlockHeader(
        codec=names[codec],
        num_rows=rows,
        stored_bytes=stored,
        raw_bytes=raw,
        schema_digest=digest,
        elements=elements,
        has_missing=missing,
        payload_start=head,
    )


def read_block(data: memoryview, schema: Schema, *, file: str) -> Table:
    """The rows of a block. Its arrays lie in ``data`` where the block is not compressed, so mapping a file copies nothing.

    Raises:
        BrokenFile: it is no whole block of this schema. Whether its bytes are those that were written, its digest says.
    """
    header = read_header(data, schema, file=file)
    payload = data[header.payload_start :]
    raw = np.frombuffer(payload, dtype=np.uint8) if header.codec == "none" else _unpack(payload, header, file)
    places, _ = _lay_out(schema, header.num_rows, header.elements, header.has_missing)
    columns = (
        _read_column(raw, field, place, header.num_rows, count, file)
        for field, place, count in zip(schema.fields, places, header.elements, strict=True)
    )
    return Table(columns=tuple(columns), num_rows=header.num_rows)


def _read_column(raw: NDArray[np.uint8], field: Field, place: _Places, rows: int, count: int, file: str) -> Column:
    valid = None
    if place.valid is not None:
        bits = raw[place.valid : place.valid + -(-rows // 8)]
        valid = np.unpackbits(bits, count=rows, bitorder="little").view(np.bool_)
    flat = raw[place.values : place.values + count * field.dtype.itemsize].view(field.dtype)
    if place.offsets is None:
        return Column(field=field, values=flat.reshape(rows, *field.shape), valid=valid)
    offsets = raw[place.offsets : place.offsets + 8 * (rows + 1)].view(np.int64)
    if offsets[0] != 0 or offsets[-1] != count or bool((offsets[1:] < offsets[:-1]).any()):
        raise BrokenFile(file, f"the lengths of column {field.name!r} do not add up to its {count} elements")
    return Column(field=field, values=flat, offsets=offsets, valid=valid)


def _lay_out(
    schema: Schema, rows: int, elements: tuple[int, ...], missing: tuple[bool, ...]
) -> tuple[list[_Places], int]:
    """Where every array begins, and the length of the payload. Python's numbers have no largest one: nothing can overflow."""
    end = 0

    def reserve(num_bytes: int) -> int:
        nonlocal end
        start = end
        end += _pad(num_bytes)
        return start

    places = []
    for field, count, gaps in zip(schema.fields, elements, missing, strict=True):
        valid = reserve(-(-rows // 8)) if gaps else None
        offsets = reserve(8 * (rows + 1)) if field.is_ragged else None
        places.append(_Places(valid=valid, offsets=offsets, values=reserve(count * field.dtype.itemsize)))
    return places, end


def _items(field: Field) -> int:
    count = 1
    for size in field.shape:
        count *= size
    return count


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _put(payload: NDArray[np.uint8], start: int, array: NDArray[Any]) -> None:
    flat = array.reshape(-1).view(np.uint8)
    payload[start : start + len(flat)] = flat


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise RequestError("blocks compressed by zstd need the package zstandard: pip install 'shoal[data]'") from error
    return zstandard


def _compress(payload: NDArray[np.uint8]) -> bytes:
    compressor = _zstandard().ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True, write_checksum=False)
    packed: bytes = compressor.compress(payload.data)
    return packed


def _unpack(payload: memoryview, header: BlockHeader, file: str) -> NDArray[np.uint8]:
    """The payload of a compressed block, into memory of the length that was checked before."""
    zstandard = _zstandard()
    try:
        frame = zstandard.get_frame_parameters(payload)
    except zstandard.ZstdError as error:
        raise BrokenFile(file, f"its payload is not zstd's: {error}") from error
    # The frame may promise what it likes: memory is taken by the header's number, which its columns agree with.
    if frame.content_size != header.raw_bytes:
        raise BrokenFile(file, f"it unpacks to {frame.content_size} bytes, and its header says {header.raw_bytes}")
    raw = np.empty(header.raw_bytes, dtype=np.uint8)
    window = max(1 << 20, 1 << (max(1, header.raw_bytes) - 1).bit_length())
    decoder = zstandard.ZstdDecompressor(max_window_size=window)
    filled = 0
    try:
        with decoder.stream_reader(payload) as stream:
            while filled < len(raw):
                count = stream.readinto(raw[filled:].data)
                if not count:
                    break
                filled += count
            rest = stream.read(1)
    except zstandard.ZstdError as error:
        raise BrokenFile(file, f"it cannot be unpacked: {error}") from error
    if filled != len(raw) or rest:
        raise BrokenFile(file, f"it unpacks to {filled}{' and more' if rest else ''} of {len(raw)} bytes")
    return raw


def cut_into_blocks(table: Table, target_bytes: int) -> Iterator[tuple[int, int]]:
    """Where to cut a table so that each block has about so many bytes: the same places however the rows arrived before.

    The last of them is a block that more rows may be added to.
    """
    ends = np.cumsum(row_bytes(table))
    start = 0
    while start < len(table):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + target_bytes, side="right"))
        stop = min(len(table), max(stop, start + 1))
        yield start, stop
        start = stop


def row_bytes(table: Table) -> NDArray[np.int64]:
    """Bytes of each row, without those that only say where it lies."""
    total = np.zeros(len(table), dtype=np.int64)
    for column in table.columns:
        size = column.field.dtype.itemsize
        if column.offsets is not None:
            total += np.diff(column.offsets) * size + 8
        else:
            total += size * _items(column.field)
    return total
