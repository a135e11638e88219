"""The headers of a Parquet file's pages, looked at before anything is unpacked.

A page header says how large its page is when it is unpacked, and a reader allocates that much: a file of a kilobyte can ask
for two gigabytes. pyarrow has no limit for it, so the headers are read here, in Thrift's compact protocol, of which only
what they use is known.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

_HEADER_BYTES = 1 << 14
_SKIPPED_DEPTH = 8


class BrokenPage(Exception):
    """A page header that is none, or asks for too much."""


def check_pages(opened: BinaryIO, metadata: Any, *, columns: frozenset[str] | None, most_bytes: int) -> None:
    """Walk over the pages of the columns that will be read.

    Args:
        opened: the file.
        metadata: its footer, as pyarrow has read it.
        columns: by the first part of their paths; all when left out.
        most_bytes: of one page, unpacked.

    Raises:
        BrokenPage: says of which column, and what is wrong.
    """
    size = opened.seek(0, 2)
    for group in range(metadata.num_row_groups):
        for place in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(place)
            name = chunk.path_in_schema.split(".")[0]
            if columns is not None and name not in columns:
                continue
            starts = [chunk.data_page_offset]
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                starts.append(chunk.dictionary_page_offset)
            at, end = min(starts), min(starts) + chunk.total_compressed_size
            if not 0 <= at <= end <= size or chunk.num_values < 0:
                raise BrokenPage(f"column {name!r} says bytes {at} to {end} of a file of {size}")
            while at < end:
                at = _check_page(opened, at, end, name, most_bytes)


def _check_page(opened: BinaryIO, at: int, end: int, name: str, most_bytes: int) -> int:
    opened.seek(at)
    header = opened.read(min(_HEADER_BYTES, end - at))
    reader = _Compact(header)
    try:
        numbers = dict(reader.whole_numbers())
    except (IndexError, ValueError) as error:
        raise BrokenPage(f"column {name!r} has no page at byte {at}: {error}") from error
    raw, stored = numbers.get(2, -1), numbers.get(3, -1)
    if raw < 0 or stored < 0 or at + reader.at + stored > end:
        raise BrokenPage(f"column {name!r} has a page at byte {at} that says {stored} bytes, {raw} unpacked")
    if raw > most_bytes:
        raise BrokenPage(
            f"column {name!r} has a page at byte {at} that unpacks {stored} bytes to {raw}; the limit is {most_bytes}"
        )
    return at + reader.at + stored


class _Compact:
    """As much of Thrift's compact protocol as a page header has."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def whole_numbers(self, depth: int = 0) -> Iterator[tuple[int, int]]:
        """Number and value of the fields of a struct that are whole numbers; moves behind the struct."""
        field = 0
        while True:
            head = self._byte()
            if head == 0:
                return
            kind, delta = head & 15, head >> 4
            field = field + delta if delta else _unzigzag(self._varint())
            if kind in (4, 5, 6):
                yield field, _unzigzag(self._varint())
            else:
                self._skip(kind, depth)

    def _skip(self, kind: int, depth: int) -> None:
        if depth > _SKIPPED_DEPTH:
            raise ValueError("structs inside structs without end")
        if kind in (1, 2):
            return
        if kind == 3:
            self.at += 1
        elif kind in (4, 5, 6):
            self._varint()
        elif kind == 7:
            self.at += 8
        elif kind == 8:
            length = self._varint()
            self.at += length
        elif kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 != 15 else self._varint()
            if count > len(self._data):
                raise ValueError(f"a list of {count}")
            for _ in range(count):
                self._skip(head & 15, depth + 1)
        elif kind == 12:
            for _ in self.whole_numbers(depth + 1):
                pass
        else:
            raise ValueError(f"type {kind}")
        if self.at > len(self._data):
            raise IndexError("it ends too early")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")


def _unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)
