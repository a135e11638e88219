"""Rows of files as a map-style source: a batch is one gather per array, and a dict of tensors where inputs have names."""

from collections.abc import Mapping

import numpy as np
import torch

from shoal.core.events import DataCache
from shoal.data.batchform import BatchForm, Branch, Leaf
from shoal.data.config import TableConfig
from shoal.data.prepare import ModelColumns, PreparedRows, PreparedSplit, prepare_rows
from shoal.data.source import Items, SampleIds, Splits
from shoal.data.sources.arrays import digest_arrays
from shoal.data.spec import IGNORED


def form_of(columns: ModelColumns) -> BatchForm | None:
    """How a batch makes the call: by keywords where inputs have names."""
    if not columns.is_named:
        return None
    names = tuple(columns.inputs)
    leaves = tuple(Leaf(place) for place in range(len(names)))
    return BatchForm(inputs=Branch(dict, names, leaves), targets=Leaf(0))


class RowSource:
    """The prepared rows of one split."""

    def __init__(self, split: PreparedSplit, rows: PreparedRows) -> None:
        self._cached = rows.cached
        self._inputs = tuple(split.inputs.values())
        self._targets = split.targets
        names = tuple(split.inputs)
        self._form = form_of(rows)
        self._each = rows.spec.tokens_per_sample
        self._is_uniform = split.unknown == 0
        # Rows of other numbers with labels of another order would be other classes.
        self._said = f"{names}{'' if rows.space is None else rows.space.digest}{rows.fitted.digest}"

        self._vocabulary = rows.vocabulary

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def uniform_weight(self) -> int | None:
        """The weight of every sample; None where some have a label that counts for nothing."""
        return self._each if self._is_uniform else None

    @property
    def vocabulary(self) -> str:
        """The target's column and its labels, for the fingerprint; empty of a regression."""
        return self._vocabulary

    def digest(self) -> str:
        """A hash of all samples, of the vocabulary of labels and of what was fitted."""
        return digest_arrays(*self._inputs, self._targets, np.frombuffer(self._said.encode(), dtype=np.uint8))

    def cache_report(self) -> DataCache | None:
        """What the cache did while the files were read: once, for nothing is read after that."""
        report, self._cached = self._cached, None
        return report

    def collate(self, ids: SampleIds) -> Items:
        """The rows with these ids."""
        chosen = np.asarray(ids, dtype=np.int64)
        targets = self._targets[chosen]
        weight = self._each * len(chosen) if self._is_uniform else int(np.count_nonzero(targets != IGNORED))
        inputs = tuple(torch.from_numpy(array[chosen]) for array in self._inputs)
        return Items(inputs=inputs, targets=torch.from_numpy(targets), weight=weight, form=self._form)


def build_rows(config: TableConfig) -> Splits:
    """The splits of a table.

    Raises:
        RequestError: the data cannot be used; names the file, the row or the column, and the fix.
    """
    rows = prepare_rows(config)
    sources: Mapping[str, RowSource] = {name: RowSource(split, rows) for name, split in rows.splits.items()}
    return Splits(train=sources["train"], validation=sources["validation"], test=sources["test"], spec=rows.spec)
