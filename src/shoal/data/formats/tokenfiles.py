"""Files of token ids: a whole-number ``.npy`` file, or raw little-endian ids. A row is a sequence of ``data.sequence`` ids.

Rows overlap by one id, as windows of a corpus do: the last id of a row is the first of the next, so that inputs and targets one
later can both be cut from it. What does not fill a row at the end of a file is left out.
"""

import io
from collections.abc import Iterator

import numpy as np
from numpy.lib import format as npy

from shoal.core.errors import RequestError
from shoal.data.formats.files import DataFile
from shoal.data.formats.options import ReadOptions
from shoal.data.table import Field, Schema, Table, number_column


def read_schema(file: DataFile, options: ReadOptions) -> Schema:
    """One column, ``tokens``.

    Raises:
        RequestError: it is no whole file of ids.
    """
    dtype, _, _ = _open(file, options)
    return Schema(fields=(Field(name="tokens", kind=dtype.str, shape=(_length(options) + 1,)),))


def read_tables(file: DataFile, schema: Schema, options: ReadOptions) -> Iterator[Table]:
    """The rows, in tables of bounded size."""
    dtype, start, count = _open(file, options)
    length = _length(options)
    num_rows = max(0, (count - 1) // length)
    step = max(1, min(options.batch_rows, options.batch_bytes // ((length + 1) * dtype.itemsize)))
    with file.open() as opened:
        for first in range(0, num_rows, step):
            rows = min(step, num_rows - first)
            opened.seek(start + first * length * dtype.itemsize)
            ids = np.frombuffer(opened.read((rows * length + 1) * dtype.itemsize), dtype=dtype)
            windows = np.lib.stride_tricks.sliding_window_view(ids, length + 1)[::length]
            yield Table.of([number_column("tokens", np.ascontiguousarray(windows))])


def _length(options: ReadOptions) -> int:
    if options.sequence is None:
        raise RequestError("a file of token ids has no rows of its own; say how long one is with data.sequence")
    return options.sequence


def _open(file: DataFile, options: ReadOptions) -> tuple[np.dtype[np.generic], int, int]:
    """Type, place of the first id, and number of ids."""
    if file.suffixes[-1:] != [".npy"]:
        dtype: np.dtype[np.generic] = np.dtype(options.dtype).newbyteorder("<")
        if file.num_bytes % dtype.itemsize:
            raise RequestError(
                f"{file.name} has {file.num_bytes} bytes, which is no multiple of {dtype.itemsize} bytes per {options.dtype}; "
                "the file is torn, or data.dtype is another"
            )
        return dtype, 0, file.num_bytes // dtype.itemsize
    with file.open() as opened:
        head = io.BytesIO(opened.read(1 << 16))
    try:
        version = npy.read_magic(head)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, found = read(head, max_header_size=1 << 14)
    except ValueError as error:
        raise RequestError(f"{file.name} is not a whole .npy file: {error}; write it with numpy.save") from error
    if len(shape) != 1 or found.kind not in "iu" or found.hasobject:
        raise RequestError(
            f"{file.name} holds {found} of the shape {shape}; token ids are whole numbers in one dimension: save ids.reshape(-1)"
        )
    if head.tell() + shape[0] * found.itemsize != file.num_bytes:
        raise RequestError(
            f"{file.name} says {shape[0]} ids of {found.itemsize} bytes and has {file.num_bytes - head.tell()} bytes of them; "
            "the file is torn"
        )
    return found, head.tell(), shape[0]
