"""From tables as they come to blocks of about one size, written one after the other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.core.errors import RequestError
from shoal.data.store.block import cut_into_blocks, encode_block
from shoal.data.store.folder import BLOCKS, StoreFolder
from shoal.data.store.manifest import FileRef
from shoal.data.store.schema import first_difference
from shoal.data.store.stats import describe_json
from shoal.data.table import Schema, Table, concat_tables

MIN_BLOCK, DEFAULT_BLOCK, MAX_BLOCK = 1 << 14, 1 << 20, 1 << 26
"""Bytes of a block: from 0.25 to 4 MB serve most data; smaller ones mix better when blocks are shuffled, larger ones compress."""


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """How blocks are made."""

    target_bytes: int = DEFAULT_BLOCK
    """Of the values of a block; a row is never cut, so one that is larger makes a larger block."""
    codec: str = "none"
    """``none``: blocks are mapped into memory as they are; ``zstd``: smaller, and unpacked when they are read."""


@dataclass(frozen=True, kw_only=True)
class WrittenBlock:
    """A block that is on the disk."""

    ref: FileRef
    stats: str
    """Of its columns, as JSON."""


def check_options(options: BlockOptions) -> None:
    """Refuse sizes and codecs that there are not.

    Raises:
        RequestError: says what there is.
    """
    if not MIN_BLOCK <= options.target_bytes <= MAX_BLOCK:
        raise RequestError(
            f"a block of {options.target_bytes} bytes is outside {MIN_BLOCK} to {MAX_BLOCK}; {DEFAULT_BLOCK} serves most data"
        )
    if options.codec not in ("none", "zstd"):
        raise RequestError(f"there is no codec {options.codec!r}; it is none or zstd")


def write_blocks(
    folder: StoreFolder, tables: Iterable[Table], schema: Schema, options: BlockOptions, *, source: str
) -> Iterator[WrittenBlock]:
    """Write the rows of tables as blocks. Where they are cut depends on the rows alone, not on how tables divide them.

    Args:
        folder: of the store.
        tables: the rows, in order.
        schema: that all of them must have.
        options: of the blocks.
        source: what the rows are read from, for messages.

    Raises:
        RequestError: a table has other columns than the first.
    """
    waiting: list[Table] = []
    num_bytes = 0
    for table in tables:
        if (difference := first_difference(schema, table.schema)) is not None:
            raise RequestError(f"{source}: {difference}; every part of a store has the same columns")
        if not len(table):
            continue
        waiting.append(table)
        num_bytes += sum(column.values.nbytes for column in table.columns)
        if num_bytes >= 2 * options.target_bytes:
            rows = concat_tables(waiting)
            cuts = list(cut_into_blocks(rows, options.target_bytes))
            for start, stop in cuts[:-1]:
                yield _write_block(folder, rows.slice(start, stop), options)
            waiting = [rows.slice(*cuts[-1])]
            num_bytes = sum(column.values.nbytes for column in waiting[0].columns)
    if waiting:
        rows = concat_tables(waiting)
        for start, stop in cut_into_blocks(rows, options.target_bytes):
            yield _write_block(folder, rows.slice(start, stop), options)


def _write_block(folder: StoreFolder, rows: Table, options: BlockOptions) -> WrittenBlock:
    ref = folder.write(BLOCKS, encode_block(rows, codec=options.codec), len(rows))
    return WrittenBlock(ref=ref, stats=describe_json(rows))
