"""Steps that make features: hashes, vocabularies, buckets, parts of dates, n-grams."""

from collections import Counter
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.table import TEXT, Column, Table
from shoal.data.transform.blocks import TrainingRows, fold_groups, quantiles_of_rows
from shoal.data.transform.config import BucketConfig, DateConfig, HashConfig, NgramsConfig, VocabularyConfig
from shoal.data.transform.matrix import matrix_of, need_values, numbers
from shoal.data.transform.state import StepState


def _tokens(column: Column, step: str) -> list[Any]:
    """Each row's value as it is counted: a text, or a number; None is missing."""
    if (column.field.is_ragged and column.field.kind != TEXT) or column.field.shape or column.field.dtype.kind == "f":
        raise RequestError(
            f"data.prepare, step {step!r}: column {column.field.name!r} is {column.field.kind}; the step is for texts and "
            f"whole numbers"
        )
    if column.field.kind == TEXT:
        return [column.value(row) for row in range(len(column))]
    found = column.values.astype(np.int64).tolist()
    return (
        found
        if column.valid is None
        else [one if there else None for one, there in zip(found, column.valid, strict=True)]
    )


def apply_hash(table: Table, config: HashConfig, state: StepState) -> Table:
    """Ids by a hash that is the same on every machine; a missing value has one too."""
    made = {}
    for name in config.columns:
        tokens = _tokens(table[name], "hash")
        hashes = {token: xxhash.xxh3_64_intdigest(f"{type(token).__name__}:{token}".encode()) for token in set(tokens)}
        ids = np.fromiter((hashes[token] % config.buckets for token in tokens), dtype=np.int64, count=len(tokens))
        made[name] = numbers(name, ids)
    return table.replace(made)


def fit_vocabulary(rows: TrainingRows, config: VocabularyConfig, shards: int) -> StepState:
    """The values of the training rows, the most frequent first, those of equal count by their bytes.

    Raises:
        RequestError: there are more than ``most``, or none.
    """

    def count(table: Table, first: int) -> list[Counter[Any]]:
        return [
            Counter(token for token in _tokens(table[name], "vocabulary") if token is not None)
            for name in config.columns
        ]

    def merge(one: list[Counter[Any]], other: list[Counter[Any]]) -> list[Counter[Any]]:
        for name, counts, more in zip(config.columns, one, other, strict=True):
            counts.update(more)
            _refuse_many(len(counts), name, config)
        return one

    found = []
    counted = fold_groups(rows, config.columns, count, merge, shards)
    need_values(np.array([len(counts) for counts in counted]), config.columns, step="vocabulary", num_rows=len(rows))
    for name, counts in zip(config.columns, counted, strict=True):
        _refuse_many(len(counts), name, config)
        ordered = sorted(counts, key=lambda token: (-counts[token], str(token).encode()))
        found.append(ordered[: config.most])
    return StepState(values={"values": found})


def _refuse_many(count: int, name: str, config: VocabularyConfig) -> None:
    if count > config.most and not config.cut:
        raise RequestError(
            f"data.prepare, step 'vocabulary': column {name!r} has {count} values or more and most is {config.most}; raise most, "
            "let rare values be 0 with cut = true, or take the step hash"
        )


def apply_vocabulary(table: Table, config: VocabularyConfig, state: StepState) -> Table:
    """Ids from 1; 0 is missing or unknown."""
    made = {}
    for name, values in zip(config.columns, state.values["values"], strict=True):
        ids = {token: place + 1 for place, token in enumerate(values)}
        tokens = _tokens(table[name], "vocabulary")
        made[name] = numbers(
            name, np.fromiter((ids.get(token, 0) for token in tokens), dtype=np.int64, count=len(tokens))
        )
    return table.replace(made)


def fit_bucket(rows: TrainingRows, config: BucketConfig, shards: int) -> StepState:
    """Edges at quantiles of the training rows, or those that were said."""
    if config.edges is not None:
        return StepState(
            arrays={f"edges{place}": np.array(sorted(config.edges)) for place in range(len(config.columns))}
        )
    shares = [number / config.buckets for number in range(1, config.buckets)]
    found = quantiles_of_rows(rows, config.columns, shares, step="bucket")
    return StepState(arrays={f"edges{place}": np.unique(edges) for place, edges in enumerate(found)})


def apply_bucket(table: Table, config: BucketConfig, state: StepState) -> Table:
    """The number of edges that a value has reached; missing stays missing."""
    values, valid = matrix_of(table, config.columns, step="bucket")
    return table.replace(
        {
            name: numbers(
                name,
                np.searchsorted(state.arrays[f"edges{place}"], values[:, place], side="right").astype(np.int64),
                valid[:, place],
            )
            for place, name in enumerate(config.columns)
        }
    )


def apply_date(table: Table, config: DateConfig, state: StepState) -> Table:
    """A column for each part, in UTC.

    Raises:
        RequestError: a column is no time.
    """
    made = {}
    for name in config.columns:
        column = table[name]
        if column.field.is_ragged or column.field.dtype.kind != "M":
            raise RequestError(
                f"data.prepare, step 'date': column {name!r} is {column.field.kind}; say its type with data.types = "
                f'{{ {name} = "time" }}'
            )
        for part in config.parts:
            made[f"{name}_{part}"] = numbers(f"{name}_{part}", _part(column.values, part), column.valid)
    return table.replace(made)


def _part(times: NDArray[Any], part: str) -> NDArray[np.int64]:
    found: NDArray[np.int64]
    days = times.astype("<M8[D]")
    if part == "year":
        found = times.astype("<M8[Y]").astype(np.int64) + 1970
        return found
    if part == "month":
        found = times.astype("<M8[M]").astype(np.int64) % 12 + 1
        return found
    if part == "day":
        found = (days - times.astype("<M8[M]").astype("<M8[D]")).astype(np.int64) + 1
        return found
    if part == "weekday":
        found = (days.astype(np.int64) + 3) % 7
        return found
    minutes = (times.astype("<M8[m]") - days.astype("<M8[m]")).astype(np.int64)
    found = minutes // 60 if part == "hour" else minutes % 60
    return found


def apply_ngrams(table: Table, config: NgramsConfig, state: StepState) -> Table:
    """(rows, buckets) of counts."""
    made = {}
    for name in config.columns:
        column = table[name]
        if column.field.kind != TEXT:
            raise RequestError(
                f"data.prepare, step 'ngrams': column {name!r} is {column.field.kind}; the step is for texts"
            )
        counts = np.zeros((len(column), config.buckets), dtype=np.float32)
        known: dict[str, int] = {}
        for row in range(len(column)):
            text = column.value(row) or ""
            for start in range(len(text) - config.size + 1):
                gram = text[start : start + config.size]
                if gram not in known:
                    known[gram] = xxhash.xxh3_64_intdigest(gram.encode()) % config.buckets
                counts[row, known[gram]] += 1
        made[name] = numbers(name, counts)
    return table.replace(made)
