"""Samples out of a store: its rows, or windows over its token ids. A batch is one read, whatever blocks its samples lie in."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.core.events import DataCache
from shoal.data.config import StoreConfig
from shoal.data.options import LoaderOptions
from shoal.data.prepare import tensor_of
from shoal.data.source import Items, SampleIds, Splits
from shoal.data.sources.rows import form_of
from shoal.data.sources.storefile import StoreData, open_store_data
from shoal.data.spec import IGNORED
from shoal.data.store.checks.watch import WatchedStore
from shoal.data.store.selection import RowSelection
from shoal.data.table import Table


class StoreRows:
    """Rows of a store: the input columns beside one another, and the target."""

    def __init__(self, data: StoreData, part: RowSelection, unknown: int = 0) -> None:
        self._data, self._part = data, part
        made = data.prepared
        self._form = None if made is None else form_of(made.columns)
        # Rows that are appended later may have unknown labels too.
        self._is_uniform = unknown == 0 and not (made is not None and data.follows and made.config.unknown == "count")
        self.options = LoaderOptions()
        self._first_data, self._first_part = data, part
        self.follows = data.follows
        self.waits_for_storage = data.reader.folder.local_path() is None
        """Batches are waited for rather than computed: several threads load them side by side."""

    @property
    def block_starts(self) -> NDArray[np.int64]:
        """(blocks + 1,): the first sample of each block that has some, and the number of samples."""
        return self._part.blocks(self._data.reader.block_starts)

    @property
    def address(self) -> str:
        """Of the store."""
        return self._data.reader.folder.address

    @property
    def row_hashes(self) -> int | None:
        """What the receipt of an epoch comes to, as the store's manifest says; None where this is a part of the rows."""
        reader = self._data.reader
        return reader.manifest.row_hashes if len(self) == len(reader) else None

    @property
    def version(self) -> int:
        """Of the store."""
        return self._data.reader.version

    def newest_version(self) -> int:
        """Of the store, as it is now."""
        return self._data.newest_version()

    def grow(self, version: int) -> None:
        """See ``Growing``."""
        if self._data.prepared is not None:
            # What was added is looked at once: its filters, its labels, its missing values. Who goes back begins at the start.
            known = self._data if version >= self.version else self._first_data
            self._data = known.grown(version)
            self._part = self._data.parts[0]
            return
        first = self._first_part
        self._data = self._first_data.grown(version)
        added = np.array([len(self._first_data.reader), len(self._data.reader)], dtype=np.int64)
        if added[0] < added[1]:
            self._part = RowSelection(np.append(first.starts, added[:1]), np.append(first.stops, added[1:]))

    def __len__(self) -> int:
        return len(self._part)

    @property
    def uniform_weight(self) -> int | None:
        """Every sample counts once; None where some have a label that counts for nothing."""
        return 1 if self._is_uniform else None

    @property
    def vocabulary(self) -> str:
        """The target's column and its labels, for the fingerprint; empty where there are none."""
        return "" if self._data.prepared is None else self._data.prepared.columns.vocabulary

    def digest(self) -> str:
        """A hash of all samples, from the digests of the blocks, and of what was fitted."""
        return self._data.digest(self._part)

    def collate(self, ids: SampleIds) -> Items:
        """The rows with these ids.

        Raises:
            BrokenFile: a block is gone, torn or altered; names its file.
            RequestError: a row has a value that a step cannot use.
        """
        rows = self._part.rows(np.asarray(ids, dtype=np.int64))
        if self._data.prepared is not None:
            made, found = self._data.prepared.make(rows)
            weight = len(rows) if self._is_uniform else int(np.count_nonzero(found != IGNORED))
            tensors = tuple(torch.from_numpy(array) for array in made)
            return Items(inputs=tensors, targets=torch.from_numpy(found), weight=weight, form=self._form)
        table = self._data.reader.read(rows)
        inputs = tensor_of(table, self._data.inputs, "the store")
        targets = self._targets(table)
        return Items(inputs=(torch.from_numpy(inputs),), targets=torch.from_numpy(targets), weight=len(table))

    def plan_reads(self, own: Sequence[SampleIds], everyone: Sequence[SampleIds]) -> int:
        """What this rank reads next, batch by batch, and what all ranks do; the number of blocks, 0 where nothing is cached."""
        if self._data.cache is None:
            return 0
        starts = self._data.reader.block_starts
        return self._data.cache.plan(
            self._data.reader.blocks, self._blocks(starts, own), self._blocks(starts, everyone)
        )

    def cache_report(self) -> DataCache | None:
        """What the cache has done since the last report; None where there is none."""
        return None if self._data.cache is None else self._data.cache.report()

    def _blocks(self, starts: NDArray[np.int64], reads: Sequence[SampleIds]) -> list[NDArray[np.int64]]:
        rows = [self._part.rows(np.asarray(ids, dtype=np.int64)) for ids in reads]
        return [np.searchsorted(starts, each, side="right") - 1 for each in rows]

    def _targets(self, table: Table) -> NDArray[Any]:
        names = self._data.targets
        if self._data.spec.kind == "classes":
            return table[names[0]].values.astype(np.int64)
        return tensor_of(table, names, "the store", what="target").reshape(len(table), -1)


class StoreWindows:
    """Windows of the token ids of a store; a sample reads one id more than it steps, as of a token file.

    What newer versions append is a sequence of its own: its windows come behind those that were there, whose numbers stay.
    """

    def __init__(self, data: StoreData, part: RowSelection) -> None:
        assert data.spec.sequence is not None
        self._sequence = data.spec.sequence
        self._first_data, self._first_part = data, part
        self.follows = data.follows
        self.options = LoaderOptions()
        self._read(data, part)

    def _read(self, data: StoreData, part: RowSelection) -> None:
        assert data.tokens is not None
        self._data, self._part, self._tokens = data, part, data.tokens
        self._firsts = np.asarray(part.starts, dtype=np.int64)
        """The first id of each range."""
        lengths = np.asarray(part.stops, dtype=np.int64) - self._firsts
        self._ends = np.cumsum(np.maximum(0, (lengths - 1) // self._sequence)).astype(np.int64)
        """(ranges,): samples of each range and of those before it."""

    @property
    def block_starts(self) -> NDArray[np.int64]:
        """(blocks + 1,): the first sample that begins in each block, and the number of samples."""
        found = [np.array([0, len(self)], dtype=np.int64)]
        for first, before, end in zip(self._firsts, np.append(0, self._ends[:-1]), self._ends, strict=True):
            found.append(np.clip(before - (-(self._tokens.starts - first) // self._sequence), before, end))
        return np.unique(np.concatenate(found))

    @property
    def address(self) -> str:
        """Of the store."""
        return self._data.reader.folder.address

    @property
    def version(self) -> int:
        """Of the store."""
        return self._data.reader.version

    def newest_version(self) -> int:
        """Of the store, as it is now."""
        return self._data.newest_version()

    def grow(self, version: int) -> None:
        """See ``Growing``."""
        first, data = self._first_part, self._first_data.grown(version)
        assert self._first_data.tokens is not None and data.tokens is not None
        added = np.array([len(self._first_data.tokens), len(data.tokens)], dtype=np.int64)
        part = RowSelection(np.append(first.starts, added[:1]), np.append(first.stops, added[1:]))
        self._read(data, part if added[0] < added[1] else first)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def uniform_weight(self) -> int | None:
        """Every sample has as many targets as tokens."""
        return self._sequence

    def digest(self) -> str:
        """A hash of all tokens, from the digests of the blocks."""
        return self._data.digest(self._part)

    def collate(self, ids: SampleIds) -> Items:
        """Inputs (B, L) and targets (B, L), the targets one token later.

        Raises:
            BrokenFile: a block is gone, torn or altered; names its file.
        """
        starts = self._places(ids)
        tokens = torch.from_numpy(self._tokens.windows(starts, self._sequence + 1))
        return Items(inputs=(tokens[:, :-1],), targets=tokens[:, 1:], weight=len(starts) * self._sequence)

    def plan_reads(self, own: Sequence[SampleIds], everyone: Sequence[SampleIds]) -> int:
        """What this rank reads next, batch by batch, and what all ranks do; the number of blocks, 0 where nothing is cached."""
        if self._data.cache is None:
            return 0
        return self._data.cache.plan(self._data.reader.blocks, self._blocks(own), self._blocks(everyone))

    def cache_report(self) -> DataCache | None:
        """What the cache has done since the last report; None where there is none."""
        return None if self._data.cache is None else self._data.cache.report()

    def _blocks(self, reads: Sequence[SampleIds]) -> list[NDArray[np.int64]]:
        # A window that goes on in the next block counts for the one in which it begins.
        return [np.searchsorted(self._tokens.starts, self._places(ids), side="right") - 1 for ids in reads]

    def _places(self, ids: SampleIds) -> NDArray[np.int64]:
        """The first token of each sample."""
        samples = np.asarray(ids, dtype=np.int64)
        if len(self._firsts) == 1:
            return np.asarray(self._firsts[0] + samples * self._sequence)
        number = np.searchsorted(self._ends, samples, side="right")
        before = np.append(0, self._ends[:-1])[number]
        return np.asarray(self._firsts[number] + (samples - before) * self._sequence)


def build_store_splits(config: StoreConfig) -> Splits:
    """Train, validation and test of a store.

    Raises:
        RequestError: there is no store, or the recipe does not fit it.
        BrokenFile: a file of it is missing, torn or altered.
    """
    data = open_store_data(config)
    sources: list[StoreRows | StoreWindows]
    if data.tokens is None:
        unknown = (0, 0, 0) if data.prepared is None else data.prepared.unknown
        sources = [StoreRows(data, part, count) for part, count in zip(data.parts, unknown, strict=True)]
    else:
        sources = [StoreWindows(data, part) for part in data.parts]
    train, validation, test = sources
    is_local = data.reader.folder.local_path() is not None
    watched = WatchedStore(data.reader) if is_local else None
    return Splits(train=train, validation=validation, test=test, spec=data.spec, watched=watched)
