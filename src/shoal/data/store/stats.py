"""What is known of the values of a column in one block: counts, extremes, and the moments that a standardisation needs.

They are found once, where the block is written, and merged in the order of blocks by Chan's rule, so that the sums over a store
have the same bits whatever wrote it. Values that are missing or not finite are counted and take no part in the rest.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.table import LIST, Column, Table

Number = int | float


@dataclass(frozen=True, kw_only=True)
class ColumnStats:
    """The values of a column in some rows."""

    rows: int
    missing: int = 0
    elements: int = 0
    """Numbers in the rows that are there: those of lists, of arrays, or one for each row; letters (bytes) of text."""
    finite: int = 0
    """Elements that the extremes and moments are of."""
    min: Number | None = None
    max: Number | None = None
    mean: float = 0.0
    m2: float = 0.0
    """Sum of the squared distances from the mean."""

    @property
    def sum(self) -> float:
        """Of the elements that are finite."""
        return self.mean * self.finite

    @property
    def variance(self) -> float:
        """Of the population of finite elements; 0 where there is none."""
        return self.m2 / self.finite if self.finite else 0.0


_FIELDS = {field.name for field in fields(ColumnStats)}


def describe_column(column: Column) -> ColumnStats:
    """The statistics of one column."""
    rows, field = len(column), column.field
    missing = 0 if column.valid is None else rows - int(np.count_nonzero(column.valid))
    is_numeric = field.dtype.kind in "biuf" and (not field.is_ragged or field.kind.startswith(LIST))
    values = _present(column)
    if not is_numeric:
        return ColumnStats(rows=rows, missing=missing, elements=int(values.size))
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)] if flat.dtype.kind == "f" else flat
    if not finite.size:
        return ColumnStats(rows=rows, missing=missing, elements=int(flat.size))
    wide = finite.astype(np.float64)
    mean = float(wide.mean())
    deviations = wide - mean
    return ColumnStats(
        rows=rows,
        missing=missing,
        elements=int(flat.size),
        finite=int(finite.size),
        min=finite.min().item(),
        max=finite.max().item(),
        mean=mean,
        m2=float(np.square(deviations).sum()),
    )


def _present(column: Column) -> NDArray[Any]:
    """The elements of the rows whose value is there."""
    if column.valid is None or bool(column.valid.all()):
        return column.values
    if column.offsets is None:
        return column.values[column.valid]
    return column.take(np.flatnonzero(column.valid)).values


def merge_stats(parts: Iterable[ColumnStats]) -> ColumnStats:
    """The statistics of all parts together, in their order (Chan, Golub and LeVeque, 1979)."""
    total = ColumnStats(rows=0)
    for part in parts:
        total = _merge(total, part)
    return total


def _merge(left: ColumnStats, right: ColumnStats) -> ColumnStats:
    finite = left.finite + right.finite
    share = right.finite / finite if finite else 0.0
    distance = right.mean - left.mean
    return ColumnStats(
        rows=left.rows + right.rows,
        missing=left.missing + right.missing,
        elements=left.elements + right.elements,
        finite=finite,
        min=min((one for one in (left.min, right.min) if one is not None), default=None),
        max=max((one for one in (left.max, right.max) if one is not None), default=None),
        mean=left.mean + distance * share,
        m2=left.m2 + right.m2 + distance * distance * left.finite * share,
    )


def describe_json(table: Table) -> str:
    """The statistics of each column as JSON, as lists of blocks keep them; the same rows give the same text."""
    return json.dumps({column.field.name: stats_values(describe_column(column)) for column in table.columns})


def stats_values(stats: ColumnStats) -> dict[str, Any]:
    """As JSON, without what is not there."""
    return {name: value for name, value in asdict(stats).items() if value is not None}


def read_stats(values: Any) -> ColumnStats:
    """Back from JSON that nobody vouches for.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(values, dict) or not set(values) <= _FIELDS or "rows" not in values:
        raise ValueError("these are no statistics of a column")
    for name, value in values.items():
        whole = name in ("rows", "missing", "elements", "finite")
        if isinstance(value, bool) and name in ("min", "max"):
            continue
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or (whole and value < 0):
            raise ValueError(f"the statistic {name} is {value!r}")
    return ColumnStats(**values)
