"""From Arrow's arrays to columns: nulls become the mask, never NaN, and times lose their zone to UTC. pyarrow is imported late.

A dictionary-encoded column of a hostile file can name one long value in every row: it is unpacked only after its size is known.
"""

from typing import Any

import numpy as np

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.formats.kinds import FLOAT, TIME, UNKNOWN
from shoal.data.table import BYTES, LIST, TEXT, Column, Field

NEEDED = "reading this format needs pyarrow; install it with: pip install 'shoal[data]'"


def require_arrow() -> Any:
    """The library.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute  # Not imported with the package, and nobody else need have done it.
    except ImportError as error:
        raise RequestError(NEEDED) from error
    return pyarrow


def field_of(name: str, kind: Any, *, where: str) -> Field:
    """The column that an Arrow type becomes.

    Raises:
        RequestError: no column can hold it.
    """
    types = require_arrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_null(kind):
        return Field(name=name, kind=UNKNOWN)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Field(name=name, kind=TEXT)
    if (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    ):
        return Field(name=name, kind=BYTES)
    if types.is_fixed_size_list(kind):
        inner = field_of(name, kind.value_type, where=where)
        if inner.is_ragged or not kind.list_size:
            raise _refused(name, kind, where)
        return Field(name=name, kind=inner.kind, shape=(kind.list_size, *inner.shape))
    if types.is_list(kind) or types.is_large_list(kind):
        inner = field_of(name, kind.value_type, where=where)
        if inner.is_ragged or inner.shape or inner.kind == UNKNOWN:
            raise _refused(name, kind, where)
        return Field(name=name, kind=LIST + inner.kind)
    if types.is_boolean(kind):
        return Field(name=name, kind="|b1")
    if types.is_date(kind):
        return Field(name=name, kind="<M8[D]")
    if types.is_timestamp(kind):
        return Field(name=name, kind=TIME)
    if types.is_decimal(kind):
        return Field(name=name, kind=FLOAT)
    if types.is_integer(kind) or types.is_floating(kind):
        return Field(name=name, kind=np.dtype(kind.to_pandas_dtype()).newbyteorder("<").str)
    raise _refused(name, kind, where)


def _refused(name: str, kind: Any, where: str) -> RequestError:
    return RequestError(
        f"{where}: column {name!r} is {kind}, and a column holds numbers, truth values, times, text, bytes or lists of "
        f"numbers; leave "
        "it out (shoal data build --columns A,B), or write it flat"
    )


def column_of(field: Field, array: Any, *, where: str, most_bytes: int) -> Column:
    """A column of the rows of an Arrow array (not chunked).

    Raises:
        RequestError: its values, unpacked, are larger than the bound.
    """
    pa = require_arrow()
    if isinstance(array, pa.DictionaryArray):
        array = _unpacked(array, field, where, most_bytes)
    valid = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    if field.kind in (TEXT, BYTES):
        return _ragged_bytes(field, array, valid)
    if field.is_ragged:
        return _lists(field, array, valid, where)
    if field.shape:
        if valid is not None:
            array = pa.array([None if one is None else one for one in array.to_pylist()], type=array.type)
        if array.values.null_count:
            raise RequestError(
                f"{where}: column {field.name!r} has a missing number inside a value; fill it, or use columns"
            )
        flat = array.values.slice(array.offset * field.shape[0], len(array) * field.shape[0])
        values = flat.to_numpy(zero_copy_only=False).astype(field.dtype)
        return Column(field=field, values=values.reshape(len(array), *field.shape), valid=valid)
    return Column(field=field, values=_numbers(field, array), valid=valid)


def _numbers(field: Field, array: Any) -> Any:
    pa = require_arrow()
    if pa.types.is_null(array.type):
        return np.zeros(len(array), field.dtype)
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("us", tz=array.type.tz), safe=False).cast(pa.int64())
        return array.fill_null(0).to_numpy(zero_copy_only=False).view(np.dtype(TIME)).astype(field.dtype)
    if pa.types.is_date(array.type):
        days = array.cast(pa.date32()).cast(pa.int32()).fill_null(0).to_numpy(zero_copy_only=False)
        return days.astype(np.int64).view("<M8[D]").astype(field.dtype)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    if array.null_count:
        array = array.fill_null(
            pa.scalar(0, pa.int8()).cast(array.type) if not pa.types.is_boolean(array.type) else False
        )
    return array.to_numpy(zero_copy_only=False).astype(field.dtype, copy=False)


def _unpacked(array: Any, field: Field, where: str, most_bytes: int) -> Any:
    pa = require_arrow()
    if field.kind in (TEXT, BYTES):
        lengths = (
            pa.compute.binary_length(array.dictionary).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        )
        chosen = array.indices.drop_null().to_numpy(zero_copy_only=False)
        size = int(lengths[chosen].sum()) if len(lengths) else 0
        if size > most_bytes:
            raise RequestError(
                f"{where}: {len(array)} rows of column {field.name!r} unpack to {format_bytes(size)}, and the limit is "
                f"{format_bytes(most_bytes)}; leave the column out (shoal data build --columns A,B), or store the values "
                "elsewhere"
            )
    return array.dictionary_decode()


def _ragged_bytes(field: Field, array: Any, valid: Any) -> Column:
    pa = require_arrow()
    if pa.types.is_null(array.type):
        return Column(
            field=field, values=np.zeros(0, np.uint8), offsets=np.zeros(len(array) + 1, np.int64), valid=valid
        )
    array = array.cast(pa.large_binary())
    if valid is not None:
        array = array.fill_null(b"")
    _, places, data = array.buffers()
    offsets = np.frombuffer(places, np.int64, len(array) + 1, 8 * array.offset)
    whole = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return Column(field=field, values=whole[offsets[0] : offsets[-1]], offsets=offsets - offsets[0], valid=valid)


def _lists(field: Field, array: Any, valid: Any, where: str) -> Column:
    pa = require_arrow()
    lengths = pa.compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = array.flatten()  # Leaves out what stands behind a missing list.
    if flat.null_count:
        raise RequestError(f"{where}: column {field.name!r} has a missing number inside a list; fill it before")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    inner = Field(name=field.name, kind=field.kind.removeprefix(LIST))
    return Column(field=field, values=_numbers(inner, flat), offsets=offsets, valid=valid)
