"""Keys of rows as small whole numbers, and hashes of keys and of row numbers that are the same on every machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key
from shoal.data.table import BYTES, TEXT, Column

Codes = NDArray[np.int64]
_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The keys of a column: which one each row has."""

    codes: Codes
    """(rows,): place of the row's key among the sorted keys."""
    names: Sequence[Any]
    """The keys: sorted by value, or by bytes where they are text."""

    @property
    def sizes(self) -> Codes:
        """Rows of each key."""
        return np.bincount(self.codes, minlength=len(self.names)).astype(np.int64)

    def hashes(self, seed: int) -> NDArray[np.uint64]:
        """64 bits for each key: of what it is, and not of which others there are."""
        key = derive_key("partition", seed)
        made = (xxhash.xxh3_64_intdigest(_as_bytes(name), seed=key) for name in self.names)
        return np.fromiter(made, dtype=np.uint64, count=len(self.names))


def _as_bytes(name: Any) -> bytes:
    if isinstance(name, bytes):
        return b"b" + name
    # A number is one key whatever the width of its column.
    return f"{'t' if isinstance(name, str) else 'n'}{name}".encode()


def group_rows(column: Column, *, where: str) -> Groups:
    """The keys of a column.

    Raises:
        RequestError: a key is missing, or the column has values that are no keys.
    """
    if column.valid is not None and not column.valid.all():
        row = int(np.flatnonzero(~column.valid)[0])
        raise RequestError(
            f"{where}: row {row + 1} has no {column.field.name!r}, the key that rows are cut by; fill or filter such rows"
        )
    if column.field.kind in (TEXT, BYTES):
        # Of encoded bytes, so that the order is that of bytes.
        values = [column.values[start:stop].tobytes() for start, stop in _spans(column)]
        names, codes = _unique_bytes(values)
        is_text = column.field.kind == TEXT
        return Groups(codes=codes, names=[name.decode() for name in names] if is_text else names)
    if column.field.is_ragged or column.field.shape:
        raise RequestError(
            f"{where}: column {column.field.name!r} has many values per row and is no key; choose another"
        )
    found, inverse = np.unique(column.values, return_inverse=True)
    return Groups(codes=inverse.astype(np.int64).reshape(-1), names=found.tolist())


def _spans(column: Column) -> Iterator[tuple[int, int]]:
    assert column.offsets is not None
    places = column.offsets.tolist()
    return pairwise(places)


def _unique_bytes(values: list[bytes]) -> tuple[list[bytes], Codes]:
    names = sorted(set(values))
    places = {name: place for place, name in enumerate(names)}
    return names, np.fromiter(map(places.__getitem__, values), dtype=np.int64, count=len(values))


def mix(values: NDArray[np.uint64], key: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits of each number, by a key or by several (SplitMix64's finaliser; Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        found = values * _STEP + np.asarray(key, dtype=np.uint64)
        found = (found ^ (found >> _SHIFTS[0])) * _FACTORS[0]
        found = (found ^ (found >> _SHIFTS[1])) * _FACTORS[1]
        mixed: NDArray[np.uint64] = found ^ (found >> _SHIFTS[2])
    return mixed


def digest_rows(rows: Codes) -> str:
    """128 bits of a set of row numbers: sums of their hashes, so that the digests of parts add up to that of the whole."""
    return f"{_digest_number(rows):032x}"


def _digest_number(rows: Codes) -> int:
    numbers = rows.astype(np.uint64)
    halves = [int(mix(numbers, derive_key("row", half)).sum(dtype=np.uint64)) for half in range(2)]
    return halves[0] << 64 | halves[1]


def add_digests(digests: Sequence[str]) -> str:
    """The digest of sets that have no row in common, put together."""
    mask = (1 << 64) - 1
    numbers = [int(digest, 16) for digest in digests]
    high = sum(number >> 64 for number in numbers) & mask
    return f"{high << 64 | sum(number & mask for number in numbers) & mask:032x}"
