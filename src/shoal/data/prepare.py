"""From ``source = "table"`` to arrays: rows are read, cut, prepared by steps that were fitted on the training rows, and labelled.

All of it is numpy, so that it can be done before any process starts, and every rank does the same: the bits depend on the
files and the recipe alone. A run keeps what was fitted in its folder, and whoever continues or evaluates it applies that
and fits nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError, did_you_mean
from shoal.core.events import DataCache
from shoal.data.config import TableConfig
from shoal.data.formats.opening import Opened, open_data
from shoal.data.formats.options import ReadOptions, Rejects
from shoal.data.labels import LabelSpace, choose_labels, count_labels, labels_of
from shoal.data.partition.certificate import CutCertificate
from shoal.data.partition.cut import NAMES, columns_of, cut_table
from shoal.data.spec import DataSpec
from shoal.data.table import Column, Field, Schema, Table, concat_tables
from shoal.data.transform.blocks import fit_shards
from shoal.data.transform.config import AnyStep
from shoal.data.transform.pipeline import apply_steps, columns_made, fit_steps
from shoal.data.transform.state import JSON_NAME, Fitted, load_fitted

_EXACT = 1 << 24
"""Whole numbers up to this one are themselves in float32."""


@dataclass(frozen=True, kw_only=True)
class PreparedSplit:
    """The rows of one split, as arrays."""

    inputs: Mapping[str, NDArray[Any]]
    """One, or by the names of the model's arguments."""
    targets: NDArray[Any]
    unknown: int = 0
    """Rows whose label no training row has; their target counts for nothing."""

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, kw_only=True)
class ModelColumns:
    """What becomes of the columns of rows, wherever those lie."""

    spec: DataSpec
    fitted: Fitted
    space: LabelSpace | None
    schema: Schema
    """Columns as they are read, of inputs, targets and steps."""
    inputs: Mapping[str, tuple[str, ...]]
    """Columns of each input by its name."""
    targets: tuple[str, ...]
    is_named: bool
    """True where inputs have names."""

    @property
    def vocabulary(self) -> str:
        """The target's column and its labels, for the fingerprint; empty of a regression."""
        return "" if self.space is None else f"{self.targets[0]!r} ({self.space.describe()})"


@dataclass(frozen=True, kw_only=True)
class PreparedRows(ModelColumns):
    """All splits, and what is known of them."""

    splits: Mapping[str, PreparedSplit]
    certificate: CutCertificate
    rejected: int = 0
    cached: DataCache | None = None
    """What the cache of the files did while they were read; None where there is none."""
    lines: tuple[str, ...] = field(default=())
    """What was done, for people."""


def open_rows(config: TableConfig) -> Opened:
    """The files of a table, with the columns that the recipe uses.

    Raises:
        RequestError: a file is missing, schemas differ, or a column does not exist.
    """
    options = ReadOptions(
        types=config.types,
        missing=config.missing,
        delimiter=config.delimiter,
        dtype=config.dtype,
        sequence=config.sequence,
        storage=config.storage,
        cache=config.cache,
        rejects=Rejects(None if config.rejects is None else Path(config.rejects).expanduser()),
    )
    opened = open_data(config.path, format=config.format, pattern=config.pattern, where=config.where, options=options)
    wanted = _mentioned(config, opened)
    refuse_unknown_columns(wanted, config.prepare, opened.schema, config.path)
    fields = tuple(field for field in opened.schema.fields if field.name in wanted)
    if not fields:
        raise RequestError(f"data.inputs names no column of {config.path}; it has {', '.join(opened.schema.names)}")
    return replace(
        opened,
        schema=Schema(fields=fields),
        options=replace(opened.options, columns=tuple(field.name for field in fields)),
    )


def _mentioned(config: TableConfig, opened: Opened) -> set[str]:
    names = set(columns_of(config.cut)) | set(_targets_of(config))
    for columns in _inputs_of(config, opened.schema.names).values():
        names |= set(columns)
    for step in config.prepare:
        names |= set(step.columns)
    return names


def refuse_unknown_columns(wanted: Iterable[str], steps: Sequence[AnyStep], schema: Schema, where: str) -> None:
    """Refuse columns that are neither read nor made by a step.

    Raises:
        RequestError: names the column, and the nearest.
    """
    made = {name for step in steps for name in columns_made(step) - set(step.columns)}
    for name in sorted(set(wanted) - made - set(schema.names)):
        near = did_you_mean(name, (*schema.names, *made))
        raise RequestError(f"data: there is no column {name!r} in {where}, and no step makes it; {near}")


def _targets_of(config: TableConfig) -> tuple[str, ...]:
    return () if config.target is None else (config.target,) if isinstance(config.target, str) else config.target


def _inputs_of(config: TableConfig, names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Columns by the name of the input; of one without a name they are all that nothing else is."""
    if isinstance(config.inputs, dict):
        return config.inputs
    others = (*columns_of(config.cut), *_targets_of(config))
    return {"": config.inputs or tuple(name for name in names if name not in others)}


def raw_schema(
    schema: Schema, inputs: Mapping[str, tuple[str, ...]], targets: Sequence[str], steps: Sequence[AnyStep]
) -> Schema:
    """The columns that are read for the model: not those that only the cut looks at."""
    used = {name for columns in inputs.values() for name in columns} | set(targets)
    used |= {name for step in steps for name in step.columns}
    return Schema(fields=tuple(field for field in schema.fields if field.name in used))


def prepare_rows(config: TableConfig) -> PreparedRows:
    """Read, cut, fit and apply.

    Raises:
        RequestError: the data cannot be used; names the file, the row or the column, and the fix.
    """
    opened = open_rows(config)
    where = opened.files[0].name if len(opened.files) == 1 else config.path
    tables = list(opened.tables())
    if not sum(map(len, tables)):
        raise RequestError(f"data.path: {where} has 0 rows; the data is empty")
    table = concat_tables(tables)
    cut = cut_table(table, config.cut, validation=config.validation, test=config.test, where=where)
    fitted, parts = _fit_or_load(table, cut.rows, cut.certificate, config)
    inputs = _inputs_of(config, parts["train"].schema.names if not config.inputs else ())
    space, unknown, targets = _targets(parts, config, where)
    fitted = replace(fitted, labels={} if space is None else {_targets_of(config)[0]: space.names})
    if config.fitted_digest is not None and fitted.digest != config.fitted_digest:
        raise RequestError(
            f"the steps fitted on {where} have the digest {fitted.digest[:12]}, and those of the run "
            f"{config.fitted_digest[:12]}: the "
            f"training rows are others than they were; bring the data back, or the folder {config.fitted}"
        )
    splits = {}
    for name, part in parts.items():
        made = {key: tensor_of(part, columns, f"the {name} split") for key, columns in inputs.items()}
        if not _targets_of(config):
            tokens = next(iter(made.values()))
            if config.format != "tokens" and opened.format != "tokens":
                raise RequestError("data.target is missing; name the column that is predicted")
            made, found = {"": tokens[:, :-1].astype(np.int64)}, tokens[:, 1:].astype(np.int64)
        else:
            found = targets[name]
        splits[name] = PreparedSplit(inputs=made, targets=found, unknown=unknown.get(name, 0))
    lines = [
        f"{table.num_rows} rows of {len(opened.files)} {opened.format} file(s) in {config.path}",
        *cut.certificate.lines(),
    ]
    lines += say_unknown(unknown)
    return PreparedRows(
        splits=splits,
        spec=_describe(splits["train"], space, config),
        certificate=cut.certificate,
        fitted=fitted,
        space=space,
        schema=raw_schema(table.schema, inputs, _targets_of(config), config.prepare),
        inputs=inputs,
        targets=_targets_of(config),
        is_named=isinstance(config.inputs, dict),
        rejected=opened.options.rejects.count,
        cached=None if opened.cache is None else opened.cache.report(),
        lines=tuple(lines),
    )


def _fit_or_load(
    table: Table, rows: Mapping[str, NDArray[np.int64]], certificate: CutCertificate, config: TableConfig
) -> tuple[Fitted, dict[str, Table]]:
    digest = certificate.sides[0].digest
    parts = {name: table.take(rows[name]) for name in NAMES}
    if config.fitted is not None and (Path(config.fitted) / JSON_NAME).is_file():
        fitted = load_fitted(Path(config.fitted))
        if fitted.rows_digest != digest:
            raise RequestError(
                f"the fitted steps in {config.fitted} have seen other rows than those of the training split now (digest "
                f"{fitted.rows_digest[:12]}, now {digest[:12]}); bring the data back, or train anew"
            )
        train = apply_steps(parts["train"], config.prepare, fitted, is_training=True)
    else:
        shards = fit_shards()
        result = fit_steps(parts["train"], rows["train"], config.prepare, train_digest=digest, shards=shards)
        fitted, train = result.fitted, result.train
    held_out = {name: apply_steps(parts[name], config.prepare, fitted) for name in NAMES[1:]}
    return fitted, {"train": train, **held_out}


def _targets(
    parts: Mapping[str, Table], config: TableConfig, where: str
) -> tuple[LabelSpace | None, dict[str, int], dict[str, NDArray[Any]]]:
    names = _targets_of(config)
    if not names:
        return None, {}, {}
    for name in names:
        _have(parts["train"], name, "target")
    if not is_label(parts["train"].schema[names[0]], names):
        return (
            None,
            {},
            {split: tensor_of(part, names, f"the {split} split", what="target") for split, part in parts.items()},
        )
    found = {split: labels_of(part, names[0], where=f"the {split} split of {where}") for split, part in parts.items()}
    counts = {split: count_labels(labels, codes) for split, (labels, codes) in found.items()}
    space, unknown = choose_labels(counts, config.labels, what=names[0], where=where)
    return space, unknown, {split: space.encode(labels, codes)[0] for split, (labels, codes) in found.items()}


def say_unknown(unknown: Mapping[str, int]) -> list[str]:
    """Rows of each split whose label is not in the vocabulary, for people."""
    return [
        f"{count} rows of the {name} split have an unknown label and count for nothing"
        for name, count in unknown.items()
        if count
    ]


def is_label(field: Field, targets: Sequence[str]) -> bool:
    """Whether the one target is a label: text, or whole numbers."""
    return len(targets) == 1 and not field.shape and (field.is_ragged or field.dtype.kind in "iub")


def _have(table: Table, name: str, what: str) -> Column:
    if name not in table.schema.names:
        raise RequestError(
            f"data.{what}: there is no column {name!r} in the files or made by a step; {did_you_mean(name, table.schema.names)}"
        )
    return table[name]


def tensor_of(table: Table, names: tuple[str, ...], where: str, what: str = "inputs") -> NDArray[Any]:
    """(rows, ...) of float32, or int64 where all columns are whole numbers.

    Raises:
        RequestError: a column is not there, is no numbers, or has missing values.
    """
    columns = [_have(table, name, what) for name in names]
    for column in columns:
        own = column.field
        if own.is_ragged or own.dtype.kind not in "iufb":
            raise RequestError(
                f"data.{what}: column {own.name!r} is {own.kind}, and the model takes numbers of one shape; make some of it in "
                f"data.prepare "
                "(hash, vocabulary, ngrams, date)"
            )
        if column.valid is not None and not column.valid.all():
            raise missing_values(own.name, int((~column.valid).sum()), where, what)
    is_whole = all(column.field.dtype.kind in "iu" for column in columns) and what == "inputs"
    kind = np.int64 if is_whole else np.float32
    if kind == np.float32 and what == "inputs":
        for column in columns:
            if column.field.dtype.kind in "iu" and column.values.size:
                refuse_rounding(column.field, int(column.values.min()), int(column.values.max()))
    if len(columns) == 1 and columns[0].field.shape:
        return np.ascontiguousarray(columns[0].values.astype(kind))
    flat = [column.values.reshape(len(table), math.prod(column.field.shape)).astype(kind) for column in columns]
    return np.ascontiguousarray(np.concatenate(flat, axis=1))


def missing_values(name: str, count: int, where: str, what: str = "inputs") -> RequestError:
    """What is said of values that a model cannot take."""
    return RequestError(
        f'data.{what}: column {name!r} has {count} missing values in {where}; write a step "fill" in data.prepare, or a step '
        '"filter" with how = "missing"'
    )


def refuse_rounding(field: Field, lowest: int, highest: int) -> None:
    """Refuse whole numbers that float32 would make others of: ids that differ would be one.

    Raises:
        RequestError: names the column, the number and what can be done.
    """
    value = highest if abs(highest) >= abs(lowest) else lowest
    if abs(value) > _EXACT:
        raise RequestError(
            f"data.inputs: column {field.name!r} has {value}, and beside columns that are no whole numbers it becomes float32, "
            f"which is exact up to {_EXACT}: ids that differ would be one; give it an input of its own (data.inputs = {{...}}), "
            "or make an id (hash, vocabulary) or a number of another scale (scale) of it in data.prepare"
        )


def _describe(train: PreparedSplit, space: LabelSpace | None, config: TableConfig) -> DataSpec:
    first = next(iter(train.inputs.values()))
    if not _targets_of(config):
        highest = max(int(first.max()), int(train.targets.max())) + 1
        return DataSpec(kind="tokens", vocab=highest, sequence=first.shape[1], tokens_per_sample=first.shape[1])
    return describe_columns(first, train.targets, space, is_named=isinstance(config.inputs, dict))


def describe_columns(
    first: NDArray[Any], targets: NDArray[Any], space: LabelSpace | None, *, is_named: bool
) -> DataSpec:
    """The shapes of rows, of which these are some: their first input and their targets."""
    kind = "own" if is_named else "classes" if space is not None else "regression"
    return DataSpec(
        kind=kind,
        features=tuple(first.shape[1:]),
        classes=None if space is None else len(space.names),
        outputs=targets.shape[1] if space is None else None,
    )
