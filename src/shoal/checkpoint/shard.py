"""One shard: the safetensors file that one rank writes, and its xxh3 sums.

safetensors' own writer neither streams, nor syncs, nor sums; this one hashes and writes the same bytes in one pass, chunk by
chunk, and never holds more than the caller's memory. Reading is the mirror: a chunk's bytes are checked against their sum
before they are used. The header is a function of the tensors' names, types and shapes, which the manifest holds; so a reader
does not interpret a header at all, it compares it byte for byte with the one that must be there. Giant headers, repeated keys
and overlapping tensors end there.

No torch: a save must be testable in a process that starts in a tenth of a second.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shoal.checkpoint.files import NotWhole, existing_file, new_file, read_into

CHUNK_BYTES = 16 * 2**20
# The kernel takes 1024 buffers in one call.
_BUFFERS_PER_CALL = 1024

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element, by safetensors' name of its type."""


@dataclass(frozen=True)
class Blob:
    """A tensor as its bytes: little-endian, contiguous, in a flat view."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What the manifest says about a shard's file."""

    size: int
    chunk_bytes: int
    sums: tuple[str, ...]
    """xxh3-64 of each chunk, as 16 hex digits."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one tensor lies in a file: bytes ``start`` to ``end`` from the file's first."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """A file before its tensors are there: the exact header, and the slots in order."""

    header: bytes
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.slots[-1].end if self.slots else len(self.header)


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def lay_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> ShardLayout:
    """The layout of a file that holds these tensors, given as ``{key: (dtype, shape)}``.

    Wide types come first, so that every tensor is aligned to its own elements for readers that map the file.
    """
    order = sorted(tensors, key=lambda key: (-ITEM_BYTES[tensors[key][0]], key))
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for key in order:
        dtype, shape = tensors[key]
        end = offset + num_bytes(dtype, shape)
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    slots = []
    start = len(header)
    for key in order:
        dtype, shape = tensors[key]
        end = start + num_bytes(dtype, shape)
        slots.append(Slot(key=key, dtype=dtype, shape=shape, start=start, end=end))
        start = end
    return ShardLayout(header=header, slots=tuple(slots))


def write_shard(
    path: Path, blobs: Mapping[str, Blob], *, chunk_bytes: int = CHUNK_BYTES, metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write, sum and fsync one safetensors file that must not exist yet.

    Raises:
        OSError: the disk refused; what was written is removed.
    """
    with new_file(path) as fd:
        return stream_shard(lambda chunk: _write_all(fd, chunk), blobs, chunk_bytes=chunk_bytes, metadata=metadata)


def stream_shard(
    put: Callable[[Sequence[memoryview]], None],
    blobs: Mapping[str, Blob],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Sum the bytes of one safetensors file and hand them to ``put``, chunk by chunk, each as a list of views."""
    layout = lay_out({key: (blob.dtype, blob.shape) for key, blob in blobs.items()}, metadata)
    for slot in layout.slots:
        assert blobs[slot.key].data.nbytes == slot.end - slot.start, f"{slot.key}: bytes do not fit {slot.shape}"
    parts = [memoryview(layout.header), *(blobs[slot.key].data for slot in layout.slots)]
    sums = []
    for chunk in _chunks(parts, chunk_bytes):
        digest = xxhash.xxh3_64()
        for piece in chunk:
            digest.update(piece)
        sums.append(digest.hexdigest())
        put(chunk)
    return FileEntry(size=layout.size, chunk_bytes=chunk_bytes, sums=tuple(sums))


def _chunks(parts: Iterable[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """The bytes of ``parts`` in order, cut every ``chunk_bytes``; a chunk is a list of views, nothing is copied."""
    pending: list[memoryview] = []
    room = chunk_bytes
    for part in parts:
        rest = part
        while len(rest):
            piece, rest = rest[:room], rest[room:]
            pending.append(piece)
            room -= len(piece)
            if room == 0:
                yield pending
                pending, room = [], chunk_bytes
    if pending:
        yield pending


def _write_all(fd: int, pieces: Sequence[memoryview]) -> None:
    waiting = list(pieces)
    first = 0
    while first < len(waiting):
        written = os.writev(fd, waiting[first : first + _BUFFERS_PER_CALL])
        while first < len(waiting) and written >= len(waiting[first]):
            written -= len(waiting[first])
            first += 1
        if written:
            waiting[first] = waiting[first][written:]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes ``start`` to ``end`` of one tensor of a file, counted from the tensor's first."""

    key: str
    start: int
    end: int


def read_shard(
    folder_fd: int, name: str, entry: FileEntry, layout: ShardLayout, *, wanted: AbstractSet[str], check_all: bool
) -> dict[str, bytearray]:
    """The bytes of the wanted tensors of a shard, each chunk checked before it is used.

    Args:
        folder_fd: the checkpoint's folder.
        name: the file inside it.
        entry: its size and sums, from the manifest.
        layout: its header and slots, from the manifest.
        wanted: keys to return; nothing is allocated for the others.
        check_all: check the chunks too that hold nothing wanted.

    Raises:
        NotWhole: names the file and what does not agree.
    """
    spans = [Span(key=slot.key, start=0, end=slot.end - slot.start) for slot in layout.slots if slot.key in wanted]
    read = read_spans(folder_fd, name, entry, layout, spans=spans, check_all=check_all)
    return {span.key: data for span, data in read}


def read_spans(
    folder_fd: int, name: str, entry: FileEntry, layout: ShardLayout, *, spans: Iterable[Span], check_all: bool
) -> Iterator[tuple[Span, bytearray]]:
    """The bytes of parts of a shard's tensors, one after the other, so that only one needs to be in memory at a time.

    Args:
        folder_fd, name, entry, layout, check_all: as for ``read_shard``.
        spans: what to read, in any order; no two overlap. Only chunks that hold some of it are read.

    Raises:
        NotWhole: names the file and what does not agree.
    """
    first_bytes = {slot.key: slot.start for slot in layout.slots}
    located = [(first_bytes[span.key] + span.start, first_bytes[span.key] + span.end, span) for span in spans]
    located.sort(key=lambda place: place[:2])
    # What has no bytes lies in no chunk.
    waiting = [place for place in located if place[0] < place[1]]
    with existing_file(folder_fd, name) as (fd, size):
        if size != entry.size:
            raise NotWhole(f"{name} has {size} bytes, the manifest says {entry.size}")
        header = bytearray(len(layout.header))
        read_into(fd, memoryview(header), 0, name)
        if header != layout.header:
            raise NotWhole(f"{name}: its header is not the one that the manifest describes")
        scratch = memoryview(bytearray(min(entry.chunk_bytes, size)))
        first, data = 0, None
        for start, expected in zip(range(0, size, entry.chunk_bytes), entry.sums, strict=True):
            end = min(start + entry.chunk_bytes, size)
            if not check_all and not (first < len(waiting) and waiting[first][0] < end):
                continue
            chunk = scratch[: end - start]
            _read_checked(fd, chunk, start, expected, name)
            while first < len(waiting) and waiting[first][0] < end:
                span_start, span_end, span = waiting[first]
                # Only now, when bytes of it have proved true, is memory taken: a declared size alone takes none.
                data = bytearray(span_end - span_start) if data is None else data
                low, high = max(start, span_start), min(end, span_end)
                data[low - span_start : high - span_start] = chunk[low - start : high - start]
                if span_end > end:
                    break
                yield span, data
                first, data = first + 1, None
    yield from ((span, bytearray()) for start, end, span in located if start == end)


def _read_checked(fd: int, chunk: memoryview, start: int, expected: str, name: str) -> None:
    read_into(fd, chunk, start, name)
    check_chunk(chunk, start, expected, name)


def check_chunk(chunk: memoryview, start: int, expected: str, name: str) -> None:
    """Hold bytes of a file, wherever they came from, to their sum.

    Raises:
        NotWhole: they are others.
    """
    actual = xxhash.xxh3_64_hexdigest(chunk)
    if actual != expected:
        end = start + len(chunk)
        raise NotWhole(f"{name}: bytes {start} to {end} have the sum {actual}, the manifest says {expected}")
