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
    table: Table, names: Sequence[str], *, step: str, nan_is_missing: bool = False
) -> tuple[NDArray[np.float64], Mask]:
    """(rows, columns) of float64, and where values are.

    Raises:
        RequestError: a column holds no single numbers, or NaN where a step cannot use it.
    """
    for name in names:
        field = table.schema[name]
        if field.is_ragged or field.shape or field.dtype.kind not in "iufb":
            raise RequestError(
                f"data.prepare, step {step!r}: column {name!r} is {_say(field)}, and the step needs one number per row"
            )
    columns = [table[name] for name in names]
    values = np.stack([column.values.astype(np.float64) for column in columns], axis=1)
    valid = np.stack([valid_of(column) for column in columns], axis=1)
    if nan_is_missing:
        valid = valid & ~np.isnan(values)
    wrong = valid & ~np.isfinite(values)
    if wrong.any():
        row, place = (int(found[0]) for found in np.nonzero(wrong))
        raise RequestError(
            f"data.prepare, step {step!r}: column {names[place]!r} has {values[row, place]} in row {row + 1}, which is no "
            f"missing "
            'value; write a step "fill" with nan = true before, or filter such rows'
        )
    return np.where(valid, values, 0.0), valid


def need_whole(valid: Mask, names: Sequence[str], *, step: str) -> None:
    """Refuse missing values.

    Raises:
        RequestError: names the column, and how many.
    """
    lost = (~valid).sum(axis=0)
    if lost.any():
        place = int(np.flatnonzero(lost)[0])
        raise RequestError(
            f"data.prepare, step {step!r}: column {names[place]!r} has {int(lost[place])} missing values; fill them in a "
            f"step before"
        )


def need_some(valid: Mask, names: Sequence[str], *, step: str) -> None:
    """Refuse a fit on a column without a value.

    Raises:
        RequestError: names the column.
    """
    count = valid.sum(axis=0)
    if len(valid) == 0 or (count == 0).any():
        place = int(np.flatnonzero(count == 0)[0])
        raise RequestError(
            f"data.prepare, step {step!r}: column {names[place]!r} has no value in the {len(valid)} training rows, so "
            f"nothing can be "
            "fitted; leave it out, or fill it with a constant"
        )


def numbers(name: str, values: NDArray[Any], valid: Mask | None = None) -> Column:
    """A column of numbers."""
    mask = None if valid is None or valid.all() else valid
    return Column(field=Field(name=name, kind=values.dtype.str, shape=values.shape[1:]), values=values, valid=mask)


def _say(field: Field) -> str:
    return f"{field.kind}{list(field.shape) if field.shape else ''}"
