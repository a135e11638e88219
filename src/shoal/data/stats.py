"""What columns hold, in numbers, over any number of rows: a batch at a time, merged in the order in which they come."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shoal.data.table import Column, Schema, Table
from shoal.data.transform.moments import Moments, merge_moments, moments_of


@dataclass(frozen=True, kw_only=True)
class ColumnStats:
    """Of one column. What makes no sense for its type is None."""

    name: str
    kind: str
    missing: int = 0
    nan: int = 0
    least: float | str | None = None
    most: float | str | None = None
    mean: float | None = None
    deviation: float | None = None


@dataclass(frozen=True, kw_only=True)
class TableStats:
    """Of all columns."""

    num_rows: int
    columns: tuple[ColumnStats, ...]

    def as_values(self) -> dict[str, Any]:
        """JSON."""
        return {"rows": self.num_rows, "columns": [asdict(column) for column in self.columns]}


class _Running:
    """One column, as far as it was read."""

    def __init__(self) -> None:
        self.missing = 0
        self.nan = 0
        self.moments: Moments | None = None
        self.times: list[np.datetime64] = []

    def add(self, column: Column) -> None:
        valid = np.ones(len(column), np.bool_) if column.valid is None else column.valid
        self.missing += int((~valid).sum())
        field = column.field
        if field.is_ragged or field.shape or not valid.any():
            return
        if field.dtype.kind == "M":
            there = column.values[valid]
            self.times = [min([*self.times, there.min()]), max([*self.times, there.max()])]
            return
        values = column.values.astype(np.float64)
        is_number = valid & ~np.isnan(values)
        self.nan += int((valid & ~is_number).sum())
        if is_number.any():
            found = moments_of(values[:, None], is_number[:, None])
            self.moments = found if self.moments is None else merge_moments(self.moments, found)


def describe_tables(schema: Schema, tables: Iterable[Table]) -> TableStats:
    """Read all rows and count."""
    running = {name: _Running() for name in schema.names}
    num_rows = 0
    for table in tables:
        num_rows += table.num_rows
        for column in table.columns:
            running[column.field.name].add(column)
    columns = []
    for field in schema.fields:
        own = running[field.name]
        kind = f"{field.kind.removeprefix('<').removeprefix('|')}{list(field.shape) if field.shape else ''}"
        told: dict[str, Any] = {"name": field.name, "kind": kind, "missing": own.missing, "nan": own.nan}
        if own.moments is not None:
            told |= {
                "least": float(own.moments.least[0]),
                "most": float(own.moments.most[0]),
                "mean": float(own.moments.mean[0]),
                "deviation": float(np.sqrt(own.moments.variance[0])),
            }
        elif own.times:
            told |= {"least": str(own.times[0]), "most": str(own.times[-1])}
        columns.append(ColumnStats(**told))
    return TableStats(num_rows=num_rows, columns=tuple(columns))
