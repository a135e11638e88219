"""A file of token ids as units of a build: each reads its range of the file, so that all processes have some of it.

A row is one id. How many make a sample is said where a run uses them (``data.sequence``), not here.
"""

import io
from collections.abc import Iterator

import numpy as np
from numpy.lib import format as npy

from shoal.core.errors import RequestError
from shoal.data.storage.opening import open_storage
from shoal.data.storage.protocol import Storage
from shoal.data.store.building.units import Unit
from shoal.data.table import Field, Schema, Table, number_column

COLUMN = "tokens"
UNIT_BYTES = 1 << 26
_READ_BYTES = 1 << 23
_HEAD_BYTES = 4096
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


def token_units(address: str, *, dtype: str = "uint16", unit_bytes: int = UNIT_BYTES) -> tuple[list[Unit], Schema]:
    """The units of a file of token ids, and their one column.

    Args:
        address: of a one-dimensional whole-number .npy file, or of raw little-endian ids in any other file.
        dtype: of raw ids.
        unit_bytes: of the ids of one unit.

    Raises:
        RequestError: there is no such file, or it is no whole file of ids.
    """
    if dtype not in DTYPES:
        raise RequestError(f"there is no type {dtype!r} of token ids; it is one of {', '.join(DTYPES)}")
    storage, path = open_storage(address)
    entry = storage.stat(path)
    kind, start = np.dtype(dtype).newbyteorder("<"), 0
    count, rest = divmod(entry.size, kind.itemsize)
    if path.endswith(".npy"):
        kind, start, count = _read_npy_head(storage, path, entry.size, address)
    elif rest:
        raise RequestError(
            f"{address} has {entry.size} bytes, which is no multiple of {kind.itemsize} bytes per {dtype}; the file is torn, or "
            "--dtype is another"
        )
    if not count:
        raise RequestError(f"{address} holds 0 token ids; the corpus is empty")
    step = max(1, unit_bytes // kind.itemsize)
    units = [
        Unit(
            name=f"{address} from id {first}",
            open=lambda first=first: _read_ids(storage, path, kind, start, first, min(count, first + step)),  # type: ignore[misc]
            fingerprint=f"{entry.size} {entry.version}",
        )
        for first in range(0, count, step)
    ]
    return units, Schema(fields=(Field(name=COLUMN, kind=kind.str),))


def _read_ids(
    storage: Storage, path: str, kind: np.dtype[np.generic], start: int, first: int, stop: int
) -> Iterator[Table]:
    step = _READ_BYTES // kind.itemsize
    for begin in range(first, stop, step):
        end = min(stop, begin + step)
        data = storage.read(path, start + begin * kind.itemsize, start + end * kind.itemsize)
        ids = np.frombuffer(data, dtype=kind)
        if kind.kind == "i" and int(ids.min()) < 0:
            raise RequestError(f"{path} holds the id {int(ids.min())}; token ids are 0 or more: is --dtype right?")
        yield Table.of([number_column(COLUMN, ids)])


def _read_npy_head(storage: Storage, path: str, size: int, address: str) -> tuple[np.dtype[np.generic], int, int]:
    """Type, place of the first id, and number of ids."""
    head = io.BytesIO(storage.read(path, 0, min(size, _HEAD_BYTES)))
    try:
        version = npy.read_magic(head)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, kind = read(head)
    except ValueError as error:
        raise RequestError(f"{address} is not a whole .npy file: {error}; write it with numpy.save") from error
    if len(shape) != 1 or kind.kind not in "iu" or kind.byteorder == ">" or is_fortran not in (True, False):
        raise RequestError(
            f"{address} holds {kind} of the shape {shape}; token ids are little-endian whole numbers in one dimension: save "
            "ids.reshape(-1) of an integer type"
        )
    start = head.tell()
    if start + shape[0] * kind.itemsize != size:
        raise RequestError(
            f"{address} has {size} bytes and its header says {start + shape[0] * kind.itemsize}; it is torn"
        )
    return kind, start, shape[0]
