"""Training rows as a fit sees them, some blocks at a time: the same fit for rows in memory and for those of a store.

What is learned from each block of ``BLOCK`` training rows is merged in one tree over the blocks' numbers, as they come, so that
neither where rows lie nor how many blocks are at work at a time changes a bit. Sixteen blocks are read at once, which are a whole
branch of the tree; no more than a few such groups are held.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.table import Table
from shoal.data.transform.matrix import masked_of, need_values
from shoal.data.transform.moments import (
    BLOCK,
    Comoments,
    Moments,
    Wanted,
    comoments_of,
    merge_comoments,
    merge_moments,
    moments_of,
)
from shoal.data.transform.quantiles import quantiles_by_column

GROUP = 16 * BLOCK
"""Rows that are read at a time: a power of two of blocks."""
_READ = 4 * GROUP
"""Rows that are read at a time for quantiles, whose bits do not depend on it."""
Made = TypeVar("Made")
Matrix = NDArray[np.float64]


class TrainingRows(Protocol):
    """Training rows as the steps before have made them."""

    @property
    def is_in_memory(self) -> bool:
        """Whether something of the size of the rows may be kept beside them."""

    def __len__(self) -> int:
        """Number of rows."""

    def read(self, start: int, stop: int, names: Sequence[str]) -> Table:
        """Rows next to one another, with these columns at least."""

    def take(self, places: NDArray[np.int64], names: Sequence[str]) -> Table:
        """Rows at these places, with these columns at least."""


def fit_shards() -> int:
    """Groups of blocks that a fit has at work at a time: as many as this process has cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class MergeTree(Generic[Made]):
    """Merges parts as they come, neighbours first: as ``merge_tree`` would merge the list of them."""

    def __init__(self, merge: Callable[[Made, Made], Made]) -> None:
        self._merge = merge
        self._parts: list[tuple[int, Made]] = []
        """How many parts are in each, which falls by half at least from one to the next."""

    def add(self, part: Made) -> None:
        """The next one."""
        size = 1
        while self._parts and self._parts[-1][0] == size:
            part, size = self._merge(self._parts.pop()[1], part), 2 * size
        self._parts.append((size, part))

    def total(self) -> Made:
        """Of all; there is one at least."""
        found = self._parts[-1][1]
        for _, part in reversed(self._parts[:-1]):
            found = self._merge(part, found)
        return found


def fold_groups(
    rows: TrainingRows,
    names: Sequence[str],
    make: Callable[[Table, int], Made],
    merge: Callable[[Made, Made], Made],
    shards: int = 1,
) -> Made:
    """What all groups of blocks give together.

    Args:
        rows: of which they are; of no rows there is one empty group.
        names: columns that are looked at.
        make: what a group and the number of its first row give; where bits depend on it, the tree over its blocks.
        merge: two of those, neighbours.
        shards: groups at work at a time; the bits do not depend on it.
    """
    tree = MergeTree(merge)
    groups = [slice(start, min(start + GROUP, len(rows))) for start in range(0, len(rows), GROUP)]
    for made in _map_in_order(
        lambda group: make(rows.read(group.start, group.stop, names), group.start), groups or [slice(0, 0)], shards
    ):
        tree.add(made)
    return tree.total()


def _map_in_order(make: Callable[[slice], Made], groups: Sequence[slice], shards: int) -> Iterator[Made]:
    if shards <= 1 or len(groups) <= 1:
        yield from map(make, groups)
        return
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(shards) as pool:
        for group in groups:
            waiting.append(pool.submit(make, group))
            if len(waiting) >= 2 * shards:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def moments_of_rows(
    rows: TrainingRows,
    names: Sequence[str],
    *,
    step: str,
    nan_is_missing: bool = False,
    only: Wanted = "all",
    shards: int = 1,
) -> Moments:
    """Of the columns, by the values that are there; each has one.

    Raises:
        RequestError: a column holds no single numbers, or has no value.
    """

    def make(table: Table, first: int) -> Moments:
        values, valid = masked_of(table, names, step=step, nan_is_missing=nan_is_missing, first=first)
        return moments_of(values, valid, only=only)

    found = fold_groups(rows, names, make, merge_moments, shards)
    need_values(found.count, names, step=step, num_rows=len(rows))
    return found


def comoments_of_rows(
    rows: TrainingRows, names: Sequence[str], matrix: Callable[[Table, int], Matrix], shards: int = 1
) -> Comoments:
    """Of all pairs of the columns of what ``matrix`` makes of each group."""
    return fold_groups(rows, names, lambda table, first: comoments_of(matrix(table, first)), merge_comoments, shards)


def count_values(rows: TrainingRows, names: Sequence[str], shards: int = 1) -> NDArray[np.int64]:
    """How many rows have each column; nothing but that is looked at."""

    def count(table: Table, first: int) -> NDArray[np.int64]:
        masks = [table[name].valid for name in names]
        return np.array([len(table) if mask is None else int(np.count_nonzero(mask)) for mask in masks], np.int64)

    return fold_groups(rows, names, count, lambda one, two: one + two, shards)


def quantiles_of_rows(
    rows: TrainingRows, names: Sequence[str], shares: Sequence[float], *, step: str, nan_is_missing: bool = False
) -> Matrix:
    """(columns, shares): exact quantiles of the values that are there.

    Raises:
        RequestError: a column holds no single numbers, or has no value.
    """

    def read() -> Iterator[list[Matrix]]:
        for start in range(0, len(rows), _READ):
            table = rows.read(start, min(start + _READ, len(rows)), names)
            values, valid = masked_of(table, names, step=step, nan_is_missing=nan_is_missing, first=start)
            yield [column if valid is None else column[valid[:, place]] for place, column in enumerate(values.T)]

    held = list(read()) if rows.is_in_memory else None
    counts, found = quantiles_by_column(read if held is None else lambda: held, len(names), shares)
    need_values(np.array(counts), names, step=step, num_rows=len(rows))
    return np.array(found).reshape(len(names), len(shares))
