"""The step ``filter``: which training rows are kept."""

from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key
from shoal.data.partition.keys import mix
from shoal.data.table import TEXT, Column, Table
from shoal.data.transform.blocks import TrainingRows, moments_of_rows
from shoal.data.transform.config import FilterConfig
from shoal.data.transform.matrix import Mask, matrix_of, need_whole, valid_of
from shoal.data.transform.moments import moments_of
from shoal.data.transform.state import StepState

_SHINGLE = 5
_BANDS, _ROWS = 32, 4
"""Two texts with a share s of common shingles meet in one of the bands with probability 1 - (1 - s^4)^32: 0.9999 at 0.7."""


BY_ROW = ("missing", "range", "zscore")
"""Filters that decide on each row by itself, given what was fitted."""


def fit_filter(rows: TrainingRows, config: FilterConfig, shards: int) -> StepState:
    """What a filter learns: with zscore the mean and the deviation of every column.

    Raises:
        RequestError: a column has no value, or holds no numbers.
    """
    if config.how != "zscore":
        return StepState()
    moments = moments_of_rows(rows, config.columns, step="filter", shards=shards)
    return StepState(arrays={"mean": moments.mean, "deviation": np.sqrt(moments.variance)})


def keep_rows(table: Table, config: FilterConfig, state: StepState) -> Mask:
    """True for the rows that stay.

    Raises:
        RequestError: a column is of the wrong kind for the filter.
    """
    if config.how == "missing":
        return _all_true(np.stack([valid_of(table[name]) for name in config.columns], axis=1))
    if config.how == "duplicates":
        return _first_ones(_row_hashes(table, config.columns))
    if config.how == "near_duplicates":
        unlike = np.ones(len(table), np.bool_)
        for name in config.columns:
            unlike &= _unlike(table[name], config.alike)
        return unlike
    values, valid = matrix_of(table, config.columns, step="filter")
    if config.how == "range":
        least = -np.inf if config.least is None else config.least
        most = np.inf if config.most is None else config.most
        return _all_true(~valid | ((values >= least) & (values <= most)))
    if config.how == "zscore":
        mean, deviation = (state.arrays.get(name) for name in ("mean", "deviation"))
        if mean is None or deviation is None:
            # A fit from before these were kept; it was of a table, whose training rows these are.
            moments = moments_of(values, valid)
            mean, deviation = moments.mean, np.sqrt(moments.variance)
        return _all_true(~valid | (np.abs(values - mean) <= config.deviations * deviation))
    need_whole(valid, config.columns, step="filter")
    return _inside_forest(values, config)


def _all_true(holds: Mask) -> Mask:
    found: Mask = holds.sum(axis=1) == holds.shape[1]
    return found


def _inside_forest(values: NDArray[np.float64], config: FilterConfig) -> Mask:
    try:
        from sklearn.ensemble import IsolationForest
    except ImportError as error:
        raise RequestError(
            "data.prepare, step 'filter': how = \"forest\" needs scikit-learn; install it with: pip install 'shoal[digits]'"
        ) from error
    forest = IsolationForest(random_state=config.seed, contamination=config.share, n_jobs=1)
    found: Mask = forest.fit_predict(values) > 0
    return found


def _row_hashes(table: Table, names: tuple[str, ...]) -> NDArray[np.uint64]:
    """A hash of each row's values, in which missing is a value of its own."""
    total = np.zeros(len(table), dtype=np.uint64)
    for place, name in enumerate(names):
        column = table[name]
        valid = valid_of(column)
        if column.offsets is None:
            flat = np.ascontiguousarray(column.values).view(np.uint8).reshape(len(column), -1)
            made = (xxhash.xxh3_64_intdigest(row.tobytes()) for row in flat)
        else:
            starts = column.offsets.tolist()
            made = (xxhash.xxh3_64_intdigest(column.values[start:stop].tobytes()) for start, stop in pairwise(starts))
        hashes = np.fromiter(made, dtype=np.uint64, count=len(column))
        total ^= mix(np.where(valid, hashes, np.uint64(1)), derive_key("column", place, name))
    return total


def _first_ones(hashes: NDArray[np.uint64]) -> Mask:
    _, first = np.unique(hashes, return_index=True)
    keep = np.zeros(len(hashes), np.bool_)
    keep[first] = True
    return keep


def _unlike(column: Column, alike: float) -> Mask:
    """Texts that are not nearly one that came before: candidates by MinHash bands, each looked at exactly."""
    if column.field.kind != TEXT:
        raise RequestError(
            f"data.prepare, step 'filter': column {column.field.name!r} is {column.field.kind}; near_duplicates is for texts"
        )
    keys = np.array([derive_key("minhash", number) for number in range(_BANDS * _ROWS)], dtype=np.uint64)[:, None]
    seen: dict[tuple[int, bytes], list[int]] = {}
    shingles: dict[int, frozenset[int]] = {}
    keep = np.ones(len(column), np.bool_)
    for row in range(len(column)):
        text = column.value(row)
        if text is None:
            continue
        own = _shingles(text)
        numbers = np.fromiter(own, dtype=np.uint64, count=len(own))
        signature = mix(numbers, keys).min(axis=1).reshape(_BANDS, _ROWS)
        bands = [(band, signature[band].tobytes()) for band in range(_BANDS)]
        candidates = {other for band in bands for other in seen.get(band, ())}
        if any(len(own & shingles[other]) >= alike * len(own | shingles[other]) for other in candidates):
            keep[row] = False
            continue
        shingles[row] = own
        for band in bands:
            seen.setdefault(band, []).append(row)
    return keep


def _shingles(text: str) -> frozenset[int]:
    folded = " ".join(text.lower().split())
    last = max(1, len(folded) - _SHINGLE + 1)
    return frozenset(xxhash.xxh3_64_intdigest(folded[start : start + _SHINGLE].encode()) for start in range(last))
