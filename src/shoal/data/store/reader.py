"""A version of a store as rows that are read by their numbers, in any order, or by their keys.

One reader has three plans: everything in memory from the start, blocks in turn, or rows all over the store. They differ in what
is kept and in what the system is told to read ahead, never in what is returned.
"""

import copy
import json
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.storage.config import StorageConfig
from shoal.data.store.blocks import FETCHED_BYTES, Blocks, Fetch
from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import PARTS, StoreFolder, open_folder
from shoal.data.store.index import PartIndex, hash_key, is_hashed
from shoal.data.store.manifest import LIST_SCHEMA, BlockList, Manifest, read_list
from shoal.data.store.stats import ColumnStats, merge_stats, read_stats
from shoal.data.table import Column, Schema, Table, concat_tables

Load = Literal["whole", "blocks", "index"]
Rows = NDArray[np.int64]


def open_store(
    address: str,
    *,
    version: int | None = None,
    columns: Sequence[str] | None = None,
    load: Load = "index",
    fetch: Fetch | None = None,
    fetched_bytes: int = FETCHED_BYTES,
    settings: StorageConfig | None = None,
) -> "StoreReader":
    """A reader of one version of a store. What is appended later it does not see.

    Args:
        address: of the store.
        version: which; the newest when left out.
        columns: that rows are read with; all when left out.
        load: ``whole``: everything in memory; ``blocks``: one behind another; ``index``: rows all over.
        fetch: where blocks of another machine come from, such as a cache; the storage itself when left out.
        fetched_bytes: how much is kept of blocks that are not mapped.
        settings: of the storage.

    Raises:
        RequestError: there is no store, no such version or no such column.
        BrokenFile: a manifest or a list of blocks is not what was written.
    """
    folder = open_folder(address, settings)
    return StoreReader(
        folder, folder.manifest(version), columns=columns, load=load, fetch=fetch, fetched_bytes=fetched_bytes
    )


def newest_version(address: str, settings: StorageConfig | None = None) -> int | None:
    """The number of a store's newest version; None where there is no store. One listing, no file is read."""
    return open_folder(address, settings).newest_version()


def read_blocks(folder: StoreFolder, manifest: Manifest) -> BlockList:
    """The blocks of a version.

    Raises:
        BrokenFile: a list is not what was written, or does not agree with the manifest.
    """
    refs = [ref for part in manifest.parts for ref in part.blocks]
    if not refs:
        raise BrokenFile(folder.address, f"version {manifest.version} has no block")
    found = read_list(concat_tables([folder.read_table(PARTS, ref, LIST_SCHEMA) for ref in refs]))
    rows = int(found.num_rows.sum())
    if (found.num_rows < 1).any() or (found.num_bytes < 1).any() or rows != manifest.num_rows:
        raise BrokenFile(
            folder.address,
            f"its lists of blocks have {rows} rows, and version {manifest.version} has {manifest.num_rows}",
        )
    return found


class StoreReader:
    """The rows of one version; a ``RowSet``."""

    def __init__(
        self,
        folder: StoreFolder,
        manifest: Manifest,
        *,
        columns: Sequence[str] | None = None,
        load: Load = "index",
        fetch: Fetch | None = None,
        fetched_bytes: int = FETCHED_BYTES,
    ) -> None:
        self.folder, self.manifest = folder, manifest
        self._read: dict[str, Any] = {"columns": columns, "load": load, "fetch": fetch, "fetched_bytes": fetched_bytes}
        self.block_list = read_blocks(folder, manifest)
        self.block_starts: Rows = self.block_list.starts()
        """(blocks + 1,): the first row of each block, and the number of rows behind the last."""
        self._starts: list[int] = self.block_starts.tolist()
        names = manifest.schema.names if columns is None else tuple(columns)
        self._places = tuple(manifest.schema.names.index(manifest.schema[name].name) for name in names)
        self._schema = Schema(fields=tuple(manifest.schema.fields[place] for place in self._places))
        self.blocks = Blocks(
            folder,
            manifest.schema,
            self.block_list,
            is_sequential=load != "index",
            fetch=fetch,
            fetched_bytes=fetched_bytes,
        )
        self._arrays: dict[int, dict[int, NDArray[Any]]] = {place: {} for place in self._places}
        self._is_flat = self.blocks.keeps_all and not any(field.is_ragged for field in self._schema.fields)
        self._indexes: list[PartIndex | None] | None = None
        self._whole: Table | None = None
        if load == "whole":
            self._whole = concat_tables(list(self.tables()))

    def at_version(self, version: int) -> "StoreReader":
        """Another version, read in the same way.

        Raises:
            RequestError: there is no such version.
        """
        return StoreReader(self.folder, self.folder.manifest(version), **self._read)

    def narrowed(self, columns: Collection[str]) -> "StoreReader":
        """The same rows with these columns only, in the store's order; what is mapped or in memory is shared.

        Raises:
            RequestError: there is no such column.
        """
        wanted = {self._schema[name].name for name in columns}
        if wanted == set(self._schema.names):
            return self
        found = copy.copy(self)
        found._read = self._read | {"columns": tuple(name for name in self._schema.names if name in wanted)}
        found._places = tuple(place for place in self._places if self.manifest.schema.fields[place].name in wanted)
        found._schema = Schema(fields=tuple(self.manifest.schema.fields[place] for place in found._places))
        found._arrays = {place: {} for place in found._places}
        found._is_flat = self.blocks.keeps_all and not any(field.is_ragged for field in found._schema.fields)
        if self._whole is not None:
            found._whole = Table.of([self._whole[name] for name in found._schema.names])
        return found

    @property
    def schema(self) -> Schema:
        """The columns that are read."""
        return self._schema

    @property
    def version(self) -> int:
        """Of the store, for as long as this reader is used."""
        return self.manifest.version

    @property
    def num_blocks(self) -> int:
        """Of the version."""
        return len(self.block_list)

    def __len__(self) -> int:
        """Number of rows."""
        return int(self.block_starts[-1])

    def read(self, rows: Rows) -> Table:
        """These rows, in this order; each block is opened once.

        Raises:
            RequestError: there is no such row.
            BrokenFile: a block is gone, torn or altered; names its file.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if self._whole is not None or not rows.size:
            self._check(rows)
            return (self._whole or self._narrow(self.blocks.table(0))).take(rows)
        # Rows of one block are what reading in order asks for: one comparison finds that out. Negative is very large here.
        number = bisect_right(self._starts, rows[0]) - 1
        if 0 <= number < len(self._starts) - 1:
            local = rows - self._starts[number]
            if np.maximum.reduce(local.view(np.uint64)) < self._starts[number + 1] - self._starts[number]:
                return self._take(self._narrow(self.blocks.table(number)), local)
        self._check(rows)
        numbers = self.block_starts.searchsorted(rows, side="right") - 1
        local = rows - self.block_starts[numbers]
        by_row = numbers.tolist()
        if self._is_flat and 2 * len(set(by_row)) > len(rows):
            found = self._read_each(by_row, local.tolist())
            if found is not None:
                return found
        tables = {number: self.blocks.table(number) for number in dict.fromkeys(by_row)}
        chosen = [[table.columns[place] for table in tables.values()] for place in self._places]
        groups = [np.flatnonzero(numbers == number) for number in tables]
        columns = tuple(_gather(parts, groups, local, len(rows)) for parts in chosen)
        return Table(columns=columns, num_rows=len(rows))

    def tables(self) -> Iterator[Table]:
        """All rows in their order, a block at a time."""
        for number in range(self.num_blocks):
            yield self._narrow(self.blocks.table(number))

    def _take(self, table: Table, local: Rows) -> Table:
        """Rows of one block; those that lie side by side are copied in one piece."""
        first = int(local[0])
        if not self._is_flat or int(local[-1]) - first != len(local) - 1 or bool((local[1:] <= local[:-1]).any()):
            return table.take(local)
        stop = first + len(local)
        columns = tuple(
            Column(
                field=column.field,
                values=column.values[first:stop].copy(),
                valid=None if column.valid is None else column.valid[first:stop].copy(),
            )
            for column in table.columns
        )
        return Table(columns=columns, num_rows=len(local))

    def _read_each(self, numbers: Sequence[int], local: Sequence[int]) -> Table | None:
        """Rows of which nearly each lies in another block: to sort them by blocks would cost more than it saves.

        None where values are missing, or where a block that was opened may be closed again.
        """
        columns = []
        for field, place in zip(self._schema.fields, self._places, strict=True):
            arrays = self._arrays[place]
            for number in set(numbers).difference(arrays):
                column = self.blocks.table(number).columns[place]
                self._is_flat = self._is_flat and self.blocks.keeps_all and column.valid is None
                arrays[number] = column.values
            if not self._is_flat:
                # Another thread may still read what was in there.
                self._arrays = {own: {} for own in self._places}
                return None
            values = np.empty((len(numbers), *field.shape), dtype=field.dtype)
            for row, number in enumerate(numbers):
                values[row] = arrays[number][local[row]]
            columns.append(Column(field=field, values=values))
        return Table(columns=tuple(columns), num_rows=len(numbers))

    def _check(self, rows: Rows) -> None:
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= len(self)):
            raise RequestError(
                f"rows {int(rows.min())} to {int(rows.max())} are asked for, and version {self.version} of {self.folder.address} "
                f"has {len(self)}"
            )

    def find(self, keys: Sequence[Any]) -> Rows:
        """The first row of each key, -1 where there is none. Of the index only what the keys need is read.

        Raises:
            RequestError: the store has no key, or one of these is no key of its column.
        """
        found = [self.find_all(key) for key in keys]
        return np.array([rows[0] if len(rows) else -1 for rows in found], dtype=np.int64)

    def find_all(self, key: Any) -> Rows:
        """Every row with a key, in their order.

        Raises:
            RequestError: the store has no key, or this is none of its column.
        """
        name = self.manifest.key
        if name is None:
            raise RequestError(f"{self.folder.address} was built without a key; build it with --key COLUMN")
        field = self.manifest.schema[name]
        wanted = hash_key(field, key)
        if self._indexes is None:
            self._indexes = [
                None if part.index is None else PartIndex(self.folder, part.index, field)
                for part in self.manifest.parts
            ]
        found, first = [np.empty(0, dtype=np.int64)], 0
        for part, index in zip(self.manifest.parts, self._indexes, strict=True):
            if index is not None:
                found.append(index.find(wanted) + first)
            first += part.num_rows
        rows = np.concatenate(found)
        if is_hashed(field):
            # Two keys may have one hash: the rows themselves decide.
            rows = rows[[self._key_of(int(row)) == key for row in rows]] if len(rows) else rows
        return rows

    def block_stats(self, number: int) -> dict[str, ColumnStats]:
        """The statistics of one block's columns.

        Raises:
            BrokenFile: they make no sense.
        """
        try:
            values = json.loads(self.block_list.stats.value(number))
            return {name: read_stats(found) for name, found in values.items()}
        except (ValueError, AttributeError, RecursionError) as error:
            raise BrokenFile(self.folder.address, f"the statistics of block {number} are none: {error}") from error

    def stats(self) -> dict[str, ColumnStats]:
        """The statistics of every column over all rows, merged in the order of blocks."""
        parts = [self.block_stats(number) for number in range(self.num_blocks)]
        return {name: merge_stats(part[name] for part in parts if name in part) for name in self.schema.names}

    def _key_of(self, row: int) -> Any:
        number = int(np.searchsorted(self.block_starts, row, side="right")) - 1
        assert self.manifest.key is not None
        return self.blocks.table(number)[self.manifest.key].value(row - int(self.block_starts[number]))

    def _narrow(self, table: Table) -> Table:
        if len(self._places) == len(table.columns):
            return table
        return Table(columns=tuple(table.columns[place] for place in self._places), num_rows=len(table))


def _gather(parts: Sequence[Column], groups: Sequence[Rows], local: Rows, num_rows: int) -> Column:
    """Rows of one column out of several blocks, each at its place."""
    field = parts[0].field
    valid = None
    if any(part.valid is not None for part in parts):
        valid = np.ones(num_rows, dtype=np.bool_)
        for part, group in zip(parts, groups, strict=True):
            if part.valid is not None:
                valid[group] = part.valid[local[group]]
    if field.is_ragged:
        return _gather_ragged(parts, groups, local, num_rows, valid)
    values = np.empty((num_rows, *field.shape), dtype=field.dtype)
    for part, group in zip(parts, groups, strict=True):
        if len(group) == 1:
            place = group[0]
            values[place] = part.values[local[place]]
        else:
            values[group] = part.values[local[group]]
    return Column(field=field, values=values, valid=valid)


def _gather_ragged(
    parts: Sequence[Column], groups: Sequence[Rows], local: Rows, num_rows: int, valid: NDArray[np.bool_] | None
) -> Column:
    field = parts[0].field
    starts, lengths = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.int64)
    for part, group in zip(parts, groups, strict=True):
        assert part.offsets is not None
        own = local[group]
        starts[group], lengths[group] = part.offsets[own], part.offsets[own + 1] - part.offsets[own]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = np.empty(offsets[-1], dtype=field.dtype)
    for part, group in zip(parts, groups, strict=True):
        sizes = lengths[group]
        ends = np.cumsum(sizes)
        steps = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
        values[steps + np.repeat(offsets[group], sizes)] = part.values[steps + np.repeat(starts[group], sizes)]
    return Column(field=field, values=values, offsets=offsets, valid=valid)
