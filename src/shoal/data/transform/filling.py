"""The step ``fill``: missing values by a constant, a mean, median or mode, the row before, neighbours or a model."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.table import TEXT, Column, Field, Table, text_column
from shoal.data.transform.blocks import (
    TrainingRows,
    comoments_of_rows,
    fold_groups,
    moments_of_rows,
    quantiles_of_rows,
)
from shoal.data.transform.config import FillConfig
from shoal.data.transform.matrix import Mask, matrix_of, need_values, numbers, sum_columns, valid_of
from shoal.data.transform.moments import block_slices, spread_rows
from shoal.data.transform.state import StepState

_MOST_NEIGHBOURS = 1 << 14
"""Training rows that are kept to find neighbours among: all, or so many evenly spread over them."""
Matrix = NDArray[np.float64]
_Counts = tuple[Any, NDArray[np.int64]]
"""Values in their order, and how often each comes."""


def fit(rows: TrainingRows, config: FillConfig, shards: int) -> StepState:
    """What missing values become.

    Raises:
        RequestError: a column has no value to learn from.
    """
    names, nan = config.columns, config.nan
    if config.how == "constant":
        return StepState()
    if config.how == "mode":
        return StepState(values={"values": _modes(rows, config, shards)})
    if config.how == "forward":
        return StepState(values={"values": [_last(rows, name, config) for name in names]})
    if config.how == "median":
        found = quantiles_of_rows(rows, names, (0.5,), step="fill", nan_is_missing=nan)
        return StepState(arrays={"values": found[:, 0].copy()})
    mean = moments_of_rows(rows, names, step="fill", nan_is_missing=nan, only="mean", shards=shards).mean
    if config.how == "mean":
        return StepState(arrays={"values": mean})
    if config.how == "neighbours":
        kept = rows.take(spread_rows(len(rows), _MOST_NEIGHBOURS), names)
        values, valid = matrix_of(kept, names, step="fill", nan_is_missing=nan)
        return StepState(arrays={"mean": mean, "rows": values, "valid": valid})
    weights, offsets = _fit_model(rows, mean, config, shards)
    return StepState(arrays={"mean": mean, "weights": weights, "offsets": offsets})


def _modes(rows: TrainingRows, config: FillConfig, shards: int) -> list[Any]:
    """The most frequent value of every column; of several the least, or the first by its bytes."""

    def count(table: Table, first: int) -> list[_Counts]:
        return [_count(table[name], config) for name in config.columns]

    def merge(one: list[_Counts], other: list[_Counts]) -> list[_Counts]:
        return [_add(counts, more) for counts, more in zip(one, other, strict=True)]

    counted = fold_groups(rows, config.columns, count, merge, shards)
    need_values(np.array([len(times) for _, times in counted]), config.columns, step="fill", num_rows=len(rows))
    found = [values[int(np.argmax(times))] for values, times in counted]
    return [value if isinstance(value, str) else value.item() for value in found]


def _count(column: Column, config: FillConfig) -> _Counts:
    """The values in their order, and how often each comes."""
    valid = _known(column, config)
    if column.field.kind == TEXT:
        counts = Counter(column.value(row) for row in np.flatnonzero(valid).tolist())
        texts = sorted(counts, key=str.encode)
        return texts, np.array([counts[text] for text in texts], np.int64)
    values, times = np.unique(column.values[valid], return_counts=True)
    return values, times.astype(np.int64)


def _add(one: _Counts, other: _Counts) -> _Counts:
    if isinstance(one[0], list):
        counts = Counter(dict(zip(one[0], one[1].tolist(), strict=True)))
        counts.update(dict(zip(other[0], other[1].tolist(), strict=True)))
        texts = sorted(counts, key=str.encode)
        return texts, np.array([counts[text] for text in texts], np.int64)
    values, places = np.unique(np.concatenate([one[0], other[0]]), return_inverse=True)
    times = np.zeros(len(values), np.int64)
    np.add.at(times, places.reshape(-1), np.concatenate([one[1], other[1]]))
    return values, times


def _last(rows: TrainingRows, name: str, config: FillConfig) -> Any:
    """The last value that there is; the one of the recipe where there is none."""
    for block in reversed(block_slices(len(rows))):
        column = rows.read(block.start, block.stop, (name,))[name]
        valid = _known(column, config)
        if valid.any():
            return _plain(column, int(np.flatnonzero(valid)[-1]))
    return config.value


def _known(column: Column, config: FillConfig) -> Mask:
    """Where there is a value that may stand for others."""
    valid = valid_of(column)
    if config.nan and not column.field.is_ragged and column.field.dtype.kind == "f":
        valid = valid & ~np.isnan(column.values)
    return valid


def _plain(column: Column, row: int) -> Any:
    if column.field.kind == TEXT:
        return column.value(row)
    value = column.values[row]
    return int(value.view(np.int64)) if column.field.dtype.kind == "M" else value.item()


def apply(table: Table, config: FillConfig, state: StepState, *, is_training: bool = False) -> Table:
    """The columns without missing values.

    The last training value, which a forward fill has learned, is for rows behind the training rows: before the first of them
    it would be of the future.

    Raises:
        RequestError: a value is of another type than the column, or a row has none before it.
    """
    if config.how in ("constant", "mode", "forward"):
        told = state.values.get("values") or [config.value] * len(config.columns)
        if config.how == "forward" and is_training:
            told = [config.value] * len(config.columns)
        return table.replace(
            {name: _fill_simple(table[name], value, config) for name, value in zip(config.columns, told, strict=True)}
        )
    values, valid = matrix_of(table, config.columns, step="fill", nan_is_missing=config.nan)
    if config.how in ("mean", "median"):
        filled = np.where(valid, values, state.arrays["values"])
    elif config.how == "neighbours":
        filled = _from_neighbours(values, valid, state, config.neighbours)
    else:
        filled = _from_model(values, valid, state)
    return table.replace({name: numbers(name, filled[:, place].copy()) for place, name in enumerate(config.columns)})


def _fill_simple(column: Column, value: Any, config: FillConfig) -> Column:
    valid = _known(column, config)
    name, field = column.field.name, column.field
    if config.how == "forward" and config.value is not None:
        value = config.value
    # The type that comes out is a matter of the recipe and not of which rows are looked at.
    kind = np.dtype(np.float64) if _becomes_fractions(field, value) else field.dtype
    source = np.arange(len(column))
    if config.how == "forward":
        source = np.maximum.accumulate(np.where(valid, source, -1))
        valid = source >= 0
        if not valid.all() and value is None:
            raise RequestError(
                f"data.prepare, step 'fill': column {name!r} has no value before row {int(np.flatnonzero(~valid)[0]) + 1}; say "
                f"value"
            )
    if valid.all():
        whole = column if config.how != "forward" else column.take(source)
        return (
            Column(field=field, values=whole.values, offsets=whole.offsets)
            if kind == field.dtype
            else numbers(name, whole.values.astype(kind))
        )
    if field.is_ragged and field.kind != TEXT:
        raise RequestError(
            f"data.prepare, step 'fill': column {name!r} is {field.kind}, and text or numbers can be filled"
        )
    if field.kind == TEXT:
        return text_column(
            name, [column.value(at) if known else str(value) for at, known in zip(source.tolist(), valid, strict=True)]
        )
    if isinstance(value, str):
        raise RequestError(f"data.prepare, step 'fill': value {value!r} is a text and column {name!r} is {field.kind}")
    constant = np.array(int(value), np.int64).view(kind) if kind.kind == "M" else np.array(value).astype(kind)
    return numbers(name, np.where(valid, column.values[np.maximum(source, 0)].astype(kind), constant))


def _becomes_fractions(field: Field, value: Any) -> bool:
    return not field.is_ragged and field.dtype.kind in "iu" and isinstance(value, float) and not value.is_integer()


def _from_neighbours(values: Matrix, valid: Mask, state: StepState, neighbours: int) -> Matrix:
    """The mean of the nearest training rows that have the value; distances are over what both rows have, scaled up to all
    columns."""
    known = state.arrays["valid"].astype(np.bool_)
    filled = np.where(valid, values, state.arrays["mean"])
    columns, weights = np.ascontiguousarray(state.arrays["rows"].T), np.ascontiguousarray(known.T).astype(np.float64)
    donors = [None if there.all() else np.flatnonzero(there) for there in known.T]
    apart, squares, shared = (np.empty(len(known)) for _ in range(3))
    for row in np.flatnonzero(~valid.all(axis=1)).tolist():
        squares.fill(0.0)
        shared.fill(0.0)
        for place in np.flatnonzero(valid[row]).tolist():
            np.subtract(columns[place], values[row, place], out=apart)
            apart *= apart
            if donors[place] is not None:
                apart *= weights[place]
            squares += apart
            shared += weights[place]
        with np.errstate(divide="ignore", invalid="ignore"):
            distances = squares * (values.shape[1] / shared)
        distances[shared == 0] = np.inf
        for place in np.flatnonzero(~valid[row]).tolist():
            there = donors[place]
            near = nearest_places(distances if there is None else distances[there], neighbours)
            if len(near):
                filled[row, place] = columns[place, near if there is None else there[near]].sum() / len(near)
    return filled


def nearest_places(distances: Matrix, count: int) -> NDArray[np.int64]:
    """The places of the least distances, in rising order, the first of those that are equal; none that is not finite."""
    places = np.arange(len(distances))
    if count < len(distances):
        bound = np.partition(distances, count - 1)[count - 1]
        places = np.flatnonzero(distances <= bound)
    chosen = places[np.argsort(distances[places], kind="stable")][:count]
    found: NDArray[np.int64] = chosen[np.isfinite(distances[chosen])]
    return found


def _fit_model(rows: TrainingRows, mean: Matrix, config: FillConfig, shards: int) -> tuple[Matrix, Matrix]:
    """(rounds, columns, columns) weights and (rounds, columns) offsets: each column from the others, by the rows that have it."""
    width = len(config.columns)
    weights = np.zeros((config.rounds, width, width))
    offsets = np.zeros((config.rounds, width))
    held: dict[int, tuple[int, Matrix, Mask]] = {}
    """By the first row of a block: how many predictions were made in it, and what came of them."""

    def filled_of(table: Table, first: int, known: int) -> tuple[Matrix, Mask]:
        """A block after so many predictions; what is not held is made anew."""
        if first in held:
            done, filled, valid = held[first]
        else:
            values, valid = matrix_of(table, config.columns, step="fill", nan_is_missing=config.nan, first=first)
            done, filled = 0, np.where(valid, values, mean)
        for at in range(done, known):
            turn, place = divmod(at, width)
            _predict(filled, valid[:, place], weights[turn, place], float(offsets[turn, place]), place)
        if rows.is_in_memory:
            held[first] = (known, filled, valid)
        return filled, valid

    for number in range(config.rounds * width):
        turn, place = divmod(number, width)
        others = [at for at in range(width) if at != place]

        def known_rows(
            table: Table, first: int, number: int = number, place: int = place, others: list[int] = others
        ) -> Matrix:
            filled, valid = filled_of(table, first, number)
            return filled[valid[:, place]][:, [*others, place]]

        moments = comoments_of_rows(rows, config.columns, known_rows, shards)
        gram = moments.c2[:-1, :-1] + config.penalty * np.eye(width - 1)
        solved = np.linalg.solve(gram, moments.c2[:-1, -1])
        weights[turn, place, others] = solved
        offsets[turn, place] = moments.mean[-1] - float((moments.mean[:-1] * solved).sum())
    return weights, offsets


def _predict(filled: Matrix, known: Mask, weights: Matrix, offset: float, place: int) -> None:
    lost = ~known
    filled[lost, place] = sum_columns(filled[lost] * weights) + offset


def _from_model(values: Matrix, valid: Mask, state: StepState) -> Matrix:
    filled = np.where(valid, values, state.arrays["mean"])
    for weights, offsets in zip(state.arrays["weights"], state.arrays["offsets"], strict=True):
        for place in range(values.shape[1]):
            _predict(filled, valid[:, place], weights[place], float(offsets[place]), place)
    return filled
