"""Building a store and appending to one: blocks first, then one exclusive create that makes the version.

Until that create nothing of what was written is in any version, and with it everything is. Whoever dies before leaves files that
no version names (``checks/unreferenced.py`` finds them); of two who append at once one creates the version, and the other puts
the same blocks behind it.
"""

import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from shoal.core.errors import RequestError, RunError
from shoal.data.receipt import hash_rows
from shoal.data.storage.protocol import AlreadyThere, Missing
from shoal.data.store.block import encode_block, read_block
from shoal.data.store.blockwriter import BlockOptions, WrittenBlock, check_options, write_blocks
from shoal.data.store.building.units import Job, Unit, run_units
from shoal.data.store.folder import (
    BLOCKS,
    BUILDING,
    PARTS,
    VERSIONS,
    StoreFolder,
    block_name,
    manifest_name,
    open_folder,
)
from shoal.data.store.index import check_key, write_index
from shoal.data.store.manifest import FileRef, Manifest, PartRef, dump_manifest, list_table
from shoal.data.store.schema import check_schema, first_difference
from shoal.data.table import Column, Schema, Table

LIST_BLOCKS = 8192
"""Blocks of one list."""
_HASHED_AT_ONCE = 1 << 20
MAX_ATTEMPTS = 1000
"""How often an append is put behind those of others before that is an error."""


class SourceMoved(RequestError):
    """The store has taken in the source up to another place than the one that rows follow."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What a new store is like."""

    block: BlockOptions = field(default_factory=BlockOptions)
    key: str | None = None
    """The column that rows are found by."""
    workers: int = 1
    """Processes that read and write."""


def build_store(
    source: Sequence[Unit] | Iterable[Table],
    destination: str,
    *,
    options: BuildOptions | None = None,
    schema: Schema | None = None,
    offsets: Mapping[str, Any] | None = None,
    on_done: Callable[[int], None] = lambda done: None,
) -> Manifest:
    """Make a store. The result is the same whatever the number of processes and however often it was interrupted.

    Args:
        source: units, which are done in parallel and each once; or tables, which are one unit.
        destination: a folder or an address without a store.
        options: of the store.
        schema: the columns; those of the first table when left out.
        offsets: how far the source was taken in, to be committed with the rows.
        on_done: told how many units are done.

    Raises:
        RequestError: there is a store already, the source has no row, or its tables differ in their columns.
        RunError: a process died.
    """
    options = options or BuildOptions()
    check_options(options.block)
    folder = open_folder(destination)
    if (version := folder.newest_version()) is not None:
        raise RequestError(
            f"{folder.address} holds a store already (version {version}); build into another folder, or append"
        )
    units = _as_units(source)
    schema = schema or _first_schema(units)
    check_schema(schema)
    if options.key is not None:
        check_key(schema, options.key)
    job = Job(folder=folder, units=units, schema=schema, options=options.block)
    blocks = [block for unit in run_units(job, workers=options.workers, on_done=on_done) for block in unit]
    if not blocks:
        raise RequestError(f"there is no row to build {folder.address} of; the source is empty")
    part = _write_part(folder, schema, blocks, options.key)
    first = Manifest(version=0, schema=schema, parts=(), key=options.key)
    made = _next_version(first, part, offsets or {})
    try:
        _create_version(folder, made, blocks)
    except AlreadyThere:
        raise RequestError(
            f"{folder.address} was built by another process meanwhile; look at it with shoal data show"
        ) from None
    for entry in list(folder.storage.list(folder.path(BUILDING))):
        folder.storage.delete(entry.path)
    return folder.manifest(made.version)


def append_store(
    tables: Iterable[Table],
    address: str,
    *,
    block: BlockOptions | None = None,
    offsets: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> Manifest:
    """Add rows to a store as a new version, behind all that is there.

    Args:
        tables: the rows, with the store's columns.
        address: of the store.
        block: how blocks are made.
        offsets: how far each source is taken in with these rows; committed with them.
        after: how far each source must have been taken in before. Where it is at ``offsets`` already, the rows are in the store
            and nothing is done: whoever died after a commit and tries again adds nothing twice.

    Returns:
        The version that has the rows; the newest one where there is nothing to add.

    Raises:
        RequestError: there is no store, its columns are others, or a source was taken in by somebody else.
        RunError: others appended again and again, and this one never came in between.
    """
    block = block or BlockOptions()
    check_options(block)
    folder = open_folder(address)
    newest = folder.manifest()
    if _is_taken_in(newest, offsets, after, folder):
        return newest
    written = list(write_blocks(folder, tables, newest.schema, block, source="what is appended"))
    part = _write_part(folder, newest.schema, written, newest.key) if written else None
    writer = secrets.token_hex(8)
    for _ in range(MAX_ATTEMPTS):
        if part is None and not offsets:
            return newest
        made = replace(_next_version(newest, part, offsets or {}), writer=writer)
        try:
            _create_version(folder, made, written)
        except AlreadyThere:
            if folder.manifest(made.version).writer == writer:
                # A storage far away did what was asked and its answer was lost: the second try found the first.
                return folder.manifest(made.version)
            newest = folder.manifest()
            if (difference := first_difference(made.schema, newest.schema)) is not None:
                raise RequestError(f"{folder.address} is another store now: {difference}") from None
            if _is_taken_in(newest, offsets, after, folder):
                return newest
            continue
        return folder.manifest(made.version)
    raise RunError(f"{folder.address}: {MAX_ATTEMPTS} versions were made by others, and none by this append; try again")


def append_units(
    units: Sequence[Unit], address: str, *, block: BlockOptions | None = None, offsets: Mapping[str, Any] | None = None
) -> Manifest:
    """Add the rows of units to a store as one new version.

    Raises:
        RequestError: as for ``append_store``.
        RunError: as for ``append_store``.
    """
    return append_store((table for unit in units for table in unit.open()), address, block=block, offsets=offsets)


def _is_taken_in(
    newest: Manifest, offsets: Mapping[str, Any] | None, after: Mapping[str, Any] | None, folder: StoreFolder
) -> bool:
    if not offsets:
        return False
    now = {name: newest.source.get(name) for name in offsets}
    if now == dict(offsets):
        return True
    if after is None:
        return False
    before = {name: after.get(name) for name in offsets}
    if now != before:
        raise SourceMoved(
            f"{folder.address}: version {newest.version} has taken in the source up to {now}, and these rows follow {before}; "
            "read the source again from there"
        )
    return False


def _next_version(before: Manifest, part: PartRef | None, offsets: Mapping[str, Any]) -> Manifest:
    hashes = before.row_hashes
    if part is not None:
        end = before.num_rows + part.num_rows
        for start in range(before.num_rows, end, _HASHED_AT_ONCE):
            hashes += hash_rows(np.arange(start, min(end, start + _HASHED_AT_ONCE), dtype=np.int64))
    return replace(
        before,
        version=before.version + 1,
        parts=(*before.parts, *([part] if part is not None else [])),
        row_hashes=hashes % 2**128,
        source={**before.source, **offsets},
        writer="",
        digest="",
    )


def _write_part(folder: StoreFolder, schema: Schema, blocks: Sequence[WrittenBlock], key: str | None) -> PartRef:
    refs = []
    for start in range(0, len(blocks), LIST_BLOCKS):
        chunk = blocks[start : start + LIST_BLOCKS]
        table = list_table([block.ref for block in chunk], [block.stats for block in chunk])
        refs.append(folder.write(PARTS, encode_block(table), len(chunk)))
    index = None
    if key is not None:
        index = write_index(folder, [_read_key(folder, schema, block.ref, key) for block in blocks])
    return PartRef(
        blocks=tuple(refs),
        num_rows=sum(block.ref.num_rows for block in blocks),
        num_blocks=len(blocks),
        num_bytes=sum(block.ref.num_bytes for block in blocks),
        index=index,
    )


def _read_key(folder: StoreFolder, schema: Schema, ref: FileRef, key: str) -> Column:
    """The key column of a block that was just written; a copy, so that the rest of the block can go."""
    found = read_block(folder.read(BLOCKS, ref), schema, file=block_name(ref.digest))[key]
    return found.take(np.arange(len(found), dtype=np.int64))


def _create_version(folder: StoreFolder, manifest: Manifest, blocks: Sequence[WrittenBlock]) -> None:
    for block in blocks:
        path = folder.path(BLOCKS, block_name(block.ref.digest))
        try:
            found = folder.storage.stat(path)
        except Missing:
            raise RunError(f"{path} was deleted before the version that names it was made; append again") from None
        if found.size != block.ref.num_bytes:
            raise RunError(f"{path} has {found.size} bytes and was written with {block.ref.num_bytes}; append again")
    folder.storage.create(folder.path(VERSIONS, manifest_name(manifest.version)), dump_manifest(manifest))


def _as_units(source: Sequence[Unit] | Iterable[Table]) -> Sequence[Unit]:
    if isinstance(source, Sequence) and all(isinstance(one, Unit) for one in source):
        return [one for one in source if isinstance(one, Unit)]
    given = cast("Iterable[Table]", source)
    iterator = iter(given)
    if iterator is not given:
        return [Unit(name="the tables", open=lambda: given)]
    # What can be gone through once only goes on behind the table that tells the columns.
    first = list(itertools.islice(iterator, 1))
    return [Unit(name="the tables", open=lambda: itertools.chain(first, iterator))]


def _first_schema(units: Sequence[Unit]) -> Schema:
    for unit in units:
        for table in unit.open():
            return table.schema
    raise RequestError("there is no row to build a store of; the source is empty")
