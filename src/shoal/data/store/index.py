"""From a key to its rows without reading them: sorted arrays in files of their own, one run of them for each part of a store.

Whole numbers are sorted as they are. Text and bytes are sorted by a hash of 64 bits, and what is found is compared with the key
itself, so that two keys with one hash are told apart. Rows are counted from the first of their part: where an append has to be
committed behind another one, its index stays as it is.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.store.block import encode_block
from shoal.data.store.folder import INDEX, StoreFolder
from shoal.data.store.manifest import FileRef
from shoal.data.table import BYTES, TEXT, Column, Field, Schema, Table, number_column

RUN_ROWS = 1 << 18
"""Entries of one file: 4 MB."""


def check_key(schema: Schema, key: str) -> None:
    """Refuse a column that rows cannot be found by.

    Raises:
        RequestError: there is no such column, or its values are no keys.
    """
    field = schema[key]
    if not is_hashed(field) and (field.dtype.kind not in "iu" or field.shape or field.is_ragged):
        raise RequestError(
            f"column {key!r} is {field.kind} {list(field.shape)}, and a key is a whole number, text or bytes; choose another key"
        )


def is_hashed(field: Field) -> bool:
    """True where the index has hashes of the keys, not the keys."""
    return field.kind in (TEXT, BYTES)


def key_dtype(field: Field) -> str:
    """The type of what is sorted."""
    return "<u8" if is_hashed(field) or field.dtype.kind == "u" else "<i8"


def run_schema(field: Field) -> Schema:
    """Of one sorted file."""
    return Schema(fields=(Field(name="key", kind=key_dtype(field)), Field(name="row", kind="<i8")))


def list_schema(field: Field) -> Schema:
    """Of the list of sorted files."""
    kind = key_dtype(field)
    return Schema(
        fields=(
            Field(name="digest", kind="|u1", shape=(16,)),
            Field(name="rows", kind="<i8"),
            Field(name="bytes", kind="<i8"),
            Field(name="first", kind=kind),
            Field(name="last", kind=kind),
        )
    )


def sortable_keys(column: Column) -> NDArray[Any]:
    """What is sorted for each row, also for rows whose key is missing."""
    field = column.field
    if not is_hashed(field):
        return column.values.astype(key_dtype(field))
    assert column.offsets is not None
    flat, offsets = np.ascontiguousarray(column.values).data, column.offsets.tolist()
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter(
        (digest(flat[start:stop]) for start, stop in itertools.pairwise(offsets)),
        dtype=np.uint64,
        count=len(column),
    )


def hash_key(field: Field, key: Any) -> int:
    """What is looked for when a key is.

    Raises:
        RequestError: it is no key of this column.
    """
    if is_hashed(field):
        wanted = str if field.kind == TEXT else bytes
        if not isinstance(key, wanted):
            raise RequestError(f"a key of column {field.name!r} is {field.kind}, and {key!r} is not")
        return xxhash.xxh3_64_intdigest(key.encode() if isinstance(key, str) else key)
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise RequestError(f"a key of column {field.name!r} is a whole number, and {key!r} is not")
    limits = np.iinfo(key_dtype(field))
    if not limits.min <= key <= limits.max:
        raise RequestError(f"a key of column {field.name!r} is from {limits.min} to {limits.max}, and {key} is not")
    return int(key)


def write_index(folder: StoreFolder, columns: Sequence[Column]) -> FileRef | None:
    """Sort the keys of a part and write them; None where no row has a key.

    Args:
        folder: of the store.
        columns: the key column of each block of the part, in their order.
    """
    field = columns[0].field
    keys = np.concatenate([sortable_keys(column) for column in columns])
    valid = np.concatenate(
        [np.ones(len(column), np.bool_) if column.valid is None else column.valid for column in columns]
    )
    rows = np.flatnonzero(valid).astype(np.int64)
    # Rows with one key stay in their order.
    order = np.argsort(keys[rows], kind="stable")
    keys, rows = keys[rows][order], rows[order]
    refs, ends = [], []
    for start in range(0, len(rows), RUN_ROWS):
        own, at = keys[start : start + RUN_ROWS], rows[start : start + RUN_ROWS]
        data = encode_block(Table.of([number_column("key", own), number_column("row", at)]))
        refs.append(folder.write(INDEX, data, len(own)))
        ends.append((own[0], own[-1]))
    if not refs:
        return None
    digests = np.frombuffer(bytes.fromhex("".join(ref.digest for ref in refs)), dtype=np.uint8).reshape(-1, 16)
    kind = key_dtype(field)
    table = Table.of(
        [
            number_column("digest", digests),
            number_column("rows", np.array([ref.num_rows for ref in refs], dtype=np.int64)),
            number_column("bytes", np.array([ref.num_bytes for ref in refs], dtype=np.int64)),
            number_column("first", np.array([first for first, _ in ends], dtype=kind)),
            number_column("last", np.array([last for _, last in ends], dtype=kind)),
        ]
    )
    return folder.write(INDEX, encode_block(table), len(refs))


class PartIndex:
    """The sorted files of one part, read as far as lookups need them."""

    def __init__(self, folder: StoreFolder, ref: FileRef, field: Field) -> None:
        self._folder, self._field = folder, field
        table = folder.read_table(INDEX, ref, list_schema(field))
        self._digests = table["digest"].values
        self._rows, self._bytes = table["rows"].values, table["bytes"].values
        self._first, self._last = table["first"].values, table["last"].values
        self._runs: dict[int, Table] = {}

    def refs(self) -> Iterator[FileRef]:
        """The sorted files."""
        for number in range(len(self._rows)):
            yield self._ref(number)

    def find(self, key: int) -> NDArray[np.int64]:
        """The rows with this key or this hash, counted from the first of the part."""
        first = int(np.searchsorted(self._last, key, side="left"))
        stop = int(np.searchsorted(self._first, key, side="right"))
        found = []
        for number in range(first, stop):
            run = self._run(number)
            keys, rows = run["key"].values, run["row"].values
            found.append(rows[np.searchsorted(keys, key, side="left") : np.searchsorted(keys, key, side="right")])
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _run(self, number: int) -> Table:
        if number not in self._runs:
            self._runs[number] = self._folder.read_table(INDEX, self._ref(number), run_schema(self._field))
        return self._runs[number]

    def _ref(self, number: int) -> FileRef:
        return FileRef(
            digest=self._digests[number].tobytes().hex(),
            num_bytes=int(self._bytes[number]),
            num_rows=int(self._rows[number]),
        )
