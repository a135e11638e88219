"""The step ``fill``: missing values by a constant, a mean, median or mode, the row before, neighbours or a model."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.table import TEXT, Column, Table, text_column
from shoal.data.transform.config import FillConfig
from shoal.data.transform.matrix import Mask, matrix_of, need_some, numbers, valid_of
from shoal.data.transform.moments import comoments_of, moments_of, spread_rows
from shoal.data.transform.quantiles import quantiles_of
from shoal.data.transform.state import StepState

_MOST_NEIGHBOURS = 1 << 14
"""Training rows that are kept to find neighbours among: all, or so many evenly spread over them."""
Matrix = NDArray[np.float64]


def fit(table: Table, config: FillConfig, shards: int) -> StepState:
    """What missing values become.

    Raises:
        RequestError: a column has no value to learn from.
    """
    if config.how == "constant":
        return StepState()
    if config.how in ("mode", "forward"):
        return StepState(values={"values": [_simple(table[name], config) for name in config.columns]})
    values, valid = matrix_of(table, config.columns, step="fill", nan_is_missing=config.nan)
    need_some(valid, config.columns, step="fill")
    if config.how == "mean":
        return StepState(arrays={"values": moments_of(values, valid, shards, only="mean").mean})
    if config.how == "median":
        found = [quantiles_of([values[valid[:, place], place]], (0.5,))[0] for place in range(len(config.columns))]
        return StepState(arrays={"values": np.array(found)})
    mean = moments_of(values, valid, shards, only="mean").mean
    if config.how == "neighbours":
        kept = spread_rows(len(values), _MOST_NEIGHBOURS)
        return StepState(arrays={"mean": mean, "rows": values[kept], "valid": valid[kept]})
    weights, offsets = _fit_model(values, valid, mean, config, shards)
    return StepState(arrays={"mean": mean, "weights": weights, "offsets": offsets})


def _simple(column: Column, config: FillConfig) -> Any:
    valid = _known(column, config)
    if not valid.any():
        if config.how == "forward":
            return config.value
        raise RequestError(
            f"data.prepare, step 'fill': column {column.field.name!r} has no value in the {len(column)} training rows, so "
            f"nothing can "
            "be fitted; leave it out, or fill it with a constant"
        )
    if config.how == "forward":
        return _plain(column, int(np.flatnonzero(valid)[-1]))
    if column.field.kind == TEXT:
        counts: dict[str, int] = {}
        for row in np.flatnonzero(valid).tolist():
            value = column.value(row)
            counts[value] = counts.get(value, 0) + 1
        return min(counts, key=lambda value: (-counts[value], value.encode()))
    found, times = np.unique(column.values[valid], return_counts=True)
    return found[np.argmax(times)].item()


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
    name = column.field.name
    if valid.all():
        return Column(field=column.field, values=column.values, offsets=column.offsets)
    if column.field.is_ragged and column.field.kind != TEXT:
        raise RequestError(
            f"data.prepare, step 'fill': column {name!r} is {column.field.kind}, and text or numbers can be filled"
        )
    source = np.arange(len(column))
    if config.how == "forward":
        source = np.maximum.accumulate(np.where(valid, source, -1))
        valid = source >= 0
        if not valid.all() and (value is None and config.value is None):
            raise RequestError(
                f"data.prepare, step 'fill': column {name!r} has no value before row {int(np.flatnonzero(~valid)[0]) + 1}; say "
                f"value"
            )
        if valid.all():
            taken = column.take(source)
            return Column(field=column.field, values=taken.values, offsets=taken.offsets)
        value = value if config.value is None else config.value
    if column.field.kind == TEXT:
        return text_column(
            name, [column.value(at) if known else str(value) for at, known in zip(source.tolist(), valid, strict=True)]
        )
    if isinstance(value, str):
        raise RequestError(
            f"data.prepare, step 'fill': value {value!r} is a text and column {name!r} is {column.field.kind}"
        )
    if column.field.dtype.kind in "iu" and isinstance(value, float) and not value.is_integer():
        return numbers(name, np.where(valid, column.values[np.maximum(source, 0)].astype(np.float64), value))
    kind = column.field.dtype
    constant = np.array(int(value), np.int64).view(kind) if kind.kind == "M" else np.array(value).astype(kind)
    return numbers(name, np.where(valid, column.values[np.maximum(source, 0)], constant))


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


def _fit_model(values: Matrix, valid: Mask, mean: Matrix, config: FillConfig, shards: int) -> tuple[Matrix, Matrix]:
    """(rounds, columns, columns) weights and (rounds, columns) offsets: each column from the others, by the rows that have it."""
    filled = np.where(valid, values, mean)
    width = values.shape[1]
    weights = np.zeros((config.rounds, width, width))
    offsets = np.zeros((config.rounds, width))
    for turn in range(config.rounds):
        for place in range(width):
            known = valid[:, place]
            others = [at for at in range(width) if at != place]
            moments = comoments_of(filled[known][:, [*others, place]], shards)
            gram = moments.c2[:-1, :-1] + config.penalty * np.eye(width - 1)
            solved = np.linalg.solve(gram, moments.c2[:-1, -1])
            weights[turn, place, others] = solved
            offsets[turn, place] = moments.mean[-1] - float((moments.mean[:-1] * solved).sum())
            _predict(filled, known, weights[turn, place], offsets[turn, place], place)
    return weights, offsets


def _predict(filled: Matrix, known: Mask, weights: Matrix, offset: float, place: int) -> None:
    lost = ~known
    filled[lost, place] = (filled[lost] * weights).sum(axis=1) + offset


def _from_model(values: Matrix, valid: Mask, state: StepState) -> Matrix:
    filled = np.where(valid, values, state.arrays["mean"])
    for weights, offsets in zip(state.arrays["weights"], state.arrays["offsets"], strict=True):
        for place in range(values.shape[1]):
            _predict(filled, valid[:, place], weights[place], float(offsets[place]), place)
    return filled
