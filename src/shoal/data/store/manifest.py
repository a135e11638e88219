"""A version of a store as a value: its columns, how many rows it has, and the lists of its blocks.

A version only ever adds to the one before: blocks keep their order, so a row's number is its id for ever. The list of the blocks
that one build or one append wrote is a table, kept in the format of blocks; the manifest names these lists by digest. An append
therefore writes a list of what it added and nothing of what was there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.store.errors import BrokenFile
from shoal.data.store.schema import read_schema, schema_values
from shoal.data.store.sealed import seal, unseal
from shoal.data.table import Column, Field, Schema, Table, number_column, text_column

FORMAT = "shoal-store"
_FORMAT_VERSION = 1
_MAX = 2**62
LIST_SCHEMA = Schema(
    fields=(
        Field(name="digest", kind="|u1", shape=(16,)),
        Field(name="rows", kind="<i8"),
        Field(name="bytes", kind="<i8"),
        Field(name="stats", kind="text"),
    )
)
"""Of a list of blocks: the digest of each file, its rows, its length, and the statistics of its columns as JSON."""


@dataclass(frozen=True, kw_only=True)
class FileRef:
    """A file of a store, by what is in it."""

    digest: str
    """128 bits in hexadecimal digits; the file's name is made of it."""
    num_bytes: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class PartRef:
    """What one build or one append added."""

    blocks: tuple[FileRef, ...]
    """Lists of blocks, one behind the other."""
    num_rows: int
    num_blocks: int
    num_bytes: int
    """Of the blocks."""
    index: FileRef | None = None
    """The list of the files that lead from a key to a row; None where the store has no key."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One version of a store."""

    version: int
    schema: Schema
    parts: tuple[PartRef, ...]
    key: str | None = None
    """The column by which rows are found."""
    row_hashes: int = 0
    """The sum of the hashes of all row ids, modulo 2^128: what an epoch's receipt must come to."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """How far each source has been taken in, as whoever appends says it: committed with the rows, so that nothing comes twice."""
    writer: str = ""
    """Which append made it, so that one whose answer was lost knows its own; empty for what was built."""
    digest: str = ""
    """Of its own text; empty until it is written or read."""

    @property
    def num_rows(self) -> int:
        """Of all parts."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_blocks(self) -> int:
        """Of all parts."""
        return sum(part.num_blocks for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Of all blocks, as they lie on the disk."""
        return sum(part.num_bytes for part in self.parts)


def dump_manifest(manifest: Manifest) -> bytes:
    """The text of a version."""
    return seal(
        {
            "format": FORMAT,
            "format_version": _FORMAT_VERSION,
            "version": manifest.version,
            "rows": manifest.num_rows,
            "row_hashes": f"{manifest.row_hashes:032x}",
            "key": manifest.key,
            "schema": schema_values(manifest.schema),
            "parts": [_part_values(part) for part in manifest.parts],
            "source": dict(manifest.source),
            "writer": manifest.writer,
        }
    )


def read_manifest(data: bytes, *, file: str, version: int) -> Manifest:
    """A version out of a text that nobody vouches for.

    Raises:
        BrokenFile: it is none, or not the one of this number.
    """
    values, digest = unseal(data, file=file)
    try:
        if values["format"] != FORMAT or values["format_version"] != _FORMAT_VERSION:
            raise ValueError(
                f"it has the format {str(values['format'])[:40]!r} {str(values['format_version'])[:9]}, and this program reads "
                f"{FORMAT!r} {_FORMAT_VERSION}"
            )
        if values["version"] != version:
            raise ValueError(f"it says that it is version {str(values['version'])[:20]}; it was renamed")
        schema = read_schema(values["schema"])
        parts = values["parts"]
        if not isinstance(parts, list) or not isinstance(values["source"], dict):
            raise ValueError("its parts or its source are none")
        manifest = Manifest(
            version=version,
            schema=schema,
            key=_key(values["key"], schema),
            parts=tuple(_read_part(part) for part in parts),
            row_hashes=_hexadecimal(values["row_hashes"]),
            source=values["source"],
            writer=str(values["writer"])[:32],
            digest=digest,
        )
        if manifest.num_rows != values["rows"]:
            raise ValueError(f"it says {values['rows']} rows, and its parts have {manifest.num_rows}")
    except KeyError as error:
        raise BrokenFile(file, f"it is no manifest: {error} is not there") from error
    except (TypeError, ValueError) as error:
        raise BrokenFile(file, f"it is no manifest: {error}") from error
    return manifest


def _key(value: Any, schema: Schema) -> str | None:
    if value is not None and value not in schema.names:
        raise ValueError("its key is no column")
    return str(value) if value is not None else None


def _part_values(part: PartRef) -> dict[str, Any]:
    return {
        "blocks": [_ref_values(ref) for ref in part.blocks],
        "rows": part.num_rows,
        "num_blocks": part.num_blocks,
        "bytes": part.num_bytes,
        "index": None if part.index is None else _ref_values(part.index),
    }


def _ref_values(ref: FileRef) -> list[Any]:
    return [ref.digest, ref.num_bytes, ref.num_rows]


def _read_part(values: Any) -> PartRef:
    blocks = tuple(_read_ref(ref) for ref in values["blocks"])
    part = PartRef(
        blocks=blocks,
        num_rows=_count(values["rows"]),
        num_blocks=_count(values["num_blocks"]),
        num_bytes=_count(values["bytes"]),
        index=None if values["index"] is None else _read_ref(values["index"]),
    )
    if sum(ref.num_rows for ref in blocks) != part.num_blocks:
        raise ValueError(
            f"a part says {part.num_blocks} blocks and its lists have {sum(ref.num_rows for ref in blocks)}"
        )
    return part


def _read_ref(values: Any) -> FileRef:
    digest, num_bytes, num_rows = values
    return FileRef(digest=_check_digest(digest), num_bytes=_count(num_bytes), num_rows=_count(num_rows))


def _check_digest(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 32 or not set(value) <= set("0123456789abcdef"):
        raise ValueError("a digest is 32 hexadecimal digits")
    return str(value)


def _hexadecimal(value: Any) -> int:
    return int(_check_digest(value), 16)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX:
        raise ValueError(f"{str(value)[:20]} is no count")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class BlockList:
    """The blocks of a version, in the order of their rows, as columns."""

    digests: NDArray[np.uint8]
    """(blocks, 16)."""
    num_rows: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    stats: Column
    """JSON text of each block."""

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.num_rows)

    def digest(self, block: int) -> str:
        """Of a block's file."""
        return bytes(self.digests[block]).hex()

    def starts(self) -> NDArray[np.int64]:
        """(blocks + 1,): the first row of each block, and the number of rows behind the last."""
        return np.concatenate([[0], np.cumsum(self.num_rows)]).astype(np.int64)


def list_table(refs: Sequence[FileRef], stats: Sequence[str]) -> Table:
    """A list of blocks as a table."""
    digests = np.frombuffer(bytes.fromhex("".join(ref.digest for ref in refs)), dtype=np.uint8).reshape(-1, 16)
    return Table.of(
        [
            number_column("digest", digests),
            number_column("rows", np.array([ref.num_rows for ref in refs], dtype=np.int64)),
            number_column("bytes", np.array([ref.num_bytes for ref in refs], dtype=np.int64)),
            text_column("stats", list(stats)),
        ]
    )


def read_list(table: Table) -> BlockList:
    """A table of blocks as a list."""
    digest, rows, num_bytes, stats = table.columns
    return BlockList(digests=digest.values, num_rows=rows.values, num_bytes=num_bytes.values, stats=stats)
