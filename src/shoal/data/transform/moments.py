"""Counts, means and squared deviations of rows, made per block and merged in one tree: the same bits for any number of shards.

Floating-point sums depend on their order. Every block of ``BLOCK`` training rows is therefore summed by itself, whoever
does it, and blocks are merged by Chan's rule (Chan, Golub and LeVeque, 1979) in a binary tree over their numbers, whoever
made them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Rows of one block. Another number gives other bits."""
Matrix = NDArray[np.float64]
Wanted = Literal["all", "mean", "range"]
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of every column."""

    count: Matrix
    mean: Matrix
    m2: Matrix
    """Sum of squared differences from the mean."""
    least: Matrix
    most: Matrix

    @property
    def variance(self) -> Matrix:
        """Of the rows themselves, divided by their number."""
        found: Matrix = self.m2 / np.maximum(self.count, 1)
        return found


@dataclass(frozen=True, kw_only=True)
class Comoments:
    """Of all pairs of columns; rows have no missing value."""

    count: float
    mean: Matrix
    c2: Matrix
    """(columns, columns): sums of products of differences from the means."""


def block_slices(num_rows: int) -> list[slice]:
    """The rows of every block."""
    return [slice(start, min(start + BLOCK, num_rows)) for start in range(0, num_rows, BLOCK)]


def spread_rows(num_rows: int, most: int) -> NDArray[np.int64]:
    """The places of ``most`` rows evenly spread over all, in their order, or of all where there are no more.

    Rows that are sorted, by time say, are then not known by the earliest alone.
    """
    taken = min(most, num_rows)
    return np.arange(taken, dtype=np.int64) * num_rows // max(1, taken)


def map_blocks(make: Callable[[slice], Result], num_rows: int, shards: int = 1) -> list[Result]:
    """What every block gives, in the order of blocks; ``shards`` of them at work at a time."""
    blocks = block_slices(num_rows) or [slice(0, 0)]
    if shards <= 1 or len(blocks) <= 1:
        return [make(block) for block in blocks]
    with ThreadPoolExecutor(shards) as pool:
        parts = pool.map(
            lambda first: [(number, make(blocks[number])) for number in range(first, len(blocks), shards)],
            range(shards),
        )
        found = dict(pair for part in parts for pair in part)
    return [found[number] for number in range(len(blocks))]


def merge_tree(parts: Sequence[Result], merge: Callable[[Result, Result], Result]) -> Result:
    """All parts merged, neighbours first: the tree depends on their number alone."""
    level = list(parts)
    while len(level) > 1:
        pairs = [merge(level[place], level[place + 1]) for place in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def moments_of(values: Matrix, valid: NDArray[np.bool_] | None, shards: int = 1, *, only: Wanted = "all") -> Moments:
    """Of the columns of a matrix, by the values that are there.

    Args:
        values: (rows, columns); what stands where a value is missing does not matter.
        valid: where values are; None where none is missing.
        shards: blocks at work at a time.
        only: the mean, or the range; what is not asked for is NaN.
    """
    return merge_tree(
        map_blocks(
            lambda rows: _block(values[rows], None if valid is None else valid[rows], only), len(values), shards
        ),
        merge_moments,
    )


def _block(values: Matrix, valid: NDArray[np.bool_] | None, only: Wanted = "all") -> Moments:
    # Column by column in memory, so that a sum does not depend on which columns stand beside it; a range never does.
    columns = values.T if only == "range" else np.ascontiguousarray(values.T)
    is_there = None if valid is None else np.ascontiguousarray(valid.T)
    if is_there is None or is_there.all():
        is_there, count = None, np.full(len(columns), float(len(values)))
    else:
        count = is_there.sum(axis=1).astype(np.float64)
    some = np.maximum(count, 1)
    unknown = np.full(len(columns), np.nan)
    mean = m2 = least = most = unknown
    if only != "range":
        mean = (columns if is_there is None else np.where(is_there, columns, 0.0)).sum(axis=1) / some
    if only == "all":
        apart = columns - mean[:, None]
        if is_there is not None:
            apart = np.where(is_there, apart, 0.0)
        # What the mean is off by its rounding is taken out again.
        m2 = (apart * apart).sum(axis=1) - apart.sum(axis=1) ** 2 / some
    if only != "mean":
        least = (columns if is_there is None else np.where(is_there, columns, np.inf)).min(axis=1)
        most = (columns if is_there is None else np.where(is_there, columns, -np.inf)).max(axis=1)
    return Moments(count=count, mean=mean, m2=m2, least=least, most=most)


def merge_moments(one: Moments, other: Moments) -> Moments:
    """Of the rows of both (Chan's rule)."""
    count = one.count + other.count
    some = np.maximum(count, 1)
    apart = other.mean - one.mean
    return Moments(
        count=count,
        mean=np.where(one.count == 0, other.mean, one.mean + apart * (other.count / some)),
        m2=one.m2 + other.m2 + apart * apart * (one.count * other.count / some),
        least=np.minimum(one.least, other.least),
        most=np.maximum(one.most, other.most),
    )


def comoments_of(values: Matrix, shards: int = 1) -> Comoments:
    """Of all pairs of the columns of a matrix, none of whose values is missing."""
    columns = np.ascontiguousarray(values.T)

    def make(rows: slice) -> Comoments:
        part = columns[:, rows]
        mean = part.sum(axis=1) / max(1, part.shape[1])
        apart = part - mean[:, None]
        c2 = np.empty((len(part), len(part)))
        for place in range(len(part)):
            # einsum without BLAS: its order does not depend on threads. Every pair is computed once.
            c2[place, place:] = c2[place:, place] = np.einsum("r,cr->c", apart[place], apart[place:])
        return Comoments(count=float(part.shape[1]), mean=mean, c2=c2)

    return merge_tree(map_blocks(make, len(values), shards), merge_comoments)


def merge_comoments(one: Comoments, other: Comoments) -> Comoments:
    """Of the rows of both (Chan's rule)."""
    if not one.count or not other.count:
        return one if one.count else other
    count = one.count + other.count
    apart = other.mean - one.mean
    c2 = one.c2 + other.c2 + np.outer(apart, apart) * (one.count * other.count / count)
    return Comoments(count=count, mean=one.mean + apart * (other.count / count), c2=c2)
