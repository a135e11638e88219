"""Columns of numbers as one matrix, with what is missing beside it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.table import Column, Field, Table

Mask = NDArray[np.bool_]


def valid_of(column: Column) -> Mask:
    """Where values are."""
    return np.ones(len(column), np.bool_) if column.valid is None else column.valid


def matrix_of(
    table: Table, names: Sequence[str], *, step: str, nan_is_missing: bool = False, first: int = 0
) -> tuple[NDArray[np.float64], Mask]:
    """(rows, columns) of float64, and where values are.

    Raises:
        RequestError: a column holds no single numbers, or NaN where a step cannot use it.
    """
    values, valid = masked_of(table, names, step=step, nan_is_missing=nan_is_missing, first=first)
    return values, np.ones(values.T.shape, np.bool_).T if valid is None else valid


def masked_of(
    table: Table, names: Sequence[str], *, step: str, nan_is_missing: bool = False, first: int = 0
) -> tuple[NDArray[np.float64], Mask | None]:
    """(rows, columns) of float64, and where values are; None where none is missing, so that no mask is made or looked at.

    Args:
        table: the rows.
        names: columns.
        step: that asks, for messages.
        nan_is_missing: NaN counts as missing.
        first: number of the first row, for messages.

    Raises:
        RequestError: a column holds no single numbers, or NaN where a step cannot use it.
    """
    for name in names:
        field = table.schema[name]
        if field.is_ragged or field.shape or field.dtype.kind not in "iufb":
            raise RequestError(
                f"data.prepare, step {step!r}: column {name!r} is {_say(field)}, and the step needs one number per row"
            )
    # Columns lie whole behind one another, as they do in the table.
    values = np.empty((len(names), table.num_rows))
    is_whole = not nan_is_missing and all(table[name].valid is None for name in names)
    valid = np.ones((len(names), 0 if is_whole else table.num_rows), np.bool_)
    for place, name in enumerate(names):
        column = table[name]
        values[place] = column.values
        if column.valid is not None:
            valid[place] = column.valid
        with np.errstate(over="ignore", invalid="ignore"):
            total = values[place].sum()
        # The sum of numbers is one, unless they are huge; then each of them is looked at.
        if not np.isfinite(total) and not np.isfinite(values[place]).all():
            if nan_is_missing:
                valid[place] &= ~np.isnan(values[place])
            wrong = np.flatnonzero(~np.isfinite(values[place]) & (True if is_whole else valid[place]))
            if len(wrong):
                raise RequestError(
                    f"data.prepare, step {step!r}: column {name!r} has {values[place, wrong[0]]} in row {first + wrong[0] + 1}, "
                    'which is no missing value; write a step "fill" with nan = true before, or filter such rows'
                )
        if column.valid is not None or nan_is_missing:
            values[place][~valid[place]] = 0.0
    return values.T, None if is_whole else valid.T


def whole_of(table: Table, names: Sequence[str], *, step: str, first: int = 0) -> NDArray[np.float64]:
    """(rows, columns) of float64, of columns that have every value.

    Raises:
        RequestError: a column holds no single numbers, or lacks one.
    """
    values, valid = masked_of(table, names, step=step, first=first)
    if valid is not None:
        need_whole(valid, names, step=step)
    return values


def need_whole(valid: Mask, names: Sequence[str], *, step: str) -> None:
    """Refuse missing values.

    Raises:
        RequestError: names the column, and how many.
    """
    need_full(valid.sum(axis=0), names, step=step, num_rows=len(valid))


def need_values(count: NDArray[Any], names: Sequence[str], *, step: str, num_rows: int) -> None:
    """Refuse a fit on a column without a value; ``count`` says how many each has.

    Raises:
        RequestError: names the column.
    """
    if (count == 0).any():
        place = int(np.flatnonzero(count == 0)[0])
        raise RequestError(
            f"data.prepare, step {step!r}: column {names[place]!r} has no value in the {num_rows} training rows, so nothing can "
            "be fitted; leave it out, or fill it with a constant"
        )


def need_full(count: NDArray[Any], names: Sequence[str], *, step: str, num_rows: int) -> None:
    """Refuse columns with fewer values than there are rows.

    Raises:
        RequestError: names the column, and how many are missing.
    """
    if (count < num_rows).any():
        place = int(np.flatnonzero(count < num_rows)[0])
        raise RequestError(
            f"data.prepare, step {step!r}: column {names[place]!r} has {int(num_rows - count[place])} missing values; fill them "
            "in a step before"
        )


def sum_columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(rows, columns) to (rows,): added from the first column to the last, so that a row's bits do not depend on how many rows
    there are."""
    total = np.zeros(len(values))
    for column in values.T:
        total = total + column
    return total


def numbers(name: str, values: NDArray[Any], valid: Mask | None = None) -> Column:
    """A column of numbers."""
    mask = None if valid is None or valid.all() else valid
    return Column(field=Field(name=name, kind=values.dtype.str, shape=values.shape[1:]), values=values, valid=mask)


def _say(field: Field) -> str:
    return f"{field.kind}{list(field.shape) if field.shape else ''}"
