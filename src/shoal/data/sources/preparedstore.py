"""Rows of a store as a model takes them: steps fitted over its blocks, one vocabulary of labels, rows prepared when they are
read.

It is what ``shoal.data.prepare`` does for rows in memory, by the same functions: a fit sees the training rows in the same
blocks, so it has the same bits, and a row goes through the same steps, one batch at a time. No rows but some
blocks are held at once; what counts values (``mode``, ``vocabulary``, labels) keeps each distinct one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.core.errors import RequestError, RunError
from shoal.data.config import StoreConfig
from shoal.data.labels import LabelsConfig, LabelSpace, choose_labels, count_labels, labels_of, sort_labels
from shoal.data.partition.keys import add_digests, digest_rows
from shoal.data.prepare import (
    ModelColumns,
    describe_columns,
    is_label,
    missing_values,
    raw_schema,
    refuse_unknown_columns,
    tensor_of,
)
from shoal.data.store.reader import StoreReader
from shoal.data.store.selection import Rows, RowSelection
from shoal.data.store.splits import PARTS
from shoal.data.table import TEXT, Schema, Table
from shoal.data.transform.blocks import count_values, fold_groups
from shoal.data.transform.config import (
    AnyStep,
    BucketConfig,
    DateConfig,
    FillConfig,
    FilterConfig,
    ScaleConfig,
)
from shoal.data.transform.filters import BY_ROW, keep_rows
from shoal.data.transform.moments import block_slices
from shoal.data.transform.pipeline import apply_some, check_steps, columns_made, fit_rows, steps_for, steps_text
from shoal.data.transform.state import JSON_NAME, Fitted, StepState, load_fitted

_DIGESTED = 1 << 20
"""Row numbers that are hashed at a time."""


@dataclass(frozen=True, kw_only=True)
class StoreFitRows:
    """Rows of a store as some steps have made them: read, and made anew, whenever a block is looked at."""

    reader: StoreReader
    part: RowSelection
    steps: tuple[AnyStep, ...] = ()
    states: tuple[StepState, ...] = ()
    is_in_memory: bool = False

    def __len__(self) -> int:
        return len(self.part)

    def read(self, start: int, stop: int, names: Sequence[str]) -> Table:
        """See ``TrainingRows``."""
        return self.take(np.arange(start, stop, dtype=np.int64), names)

    def take(self, places: Rows, names: Sequence[str]) -> Table:
        """See ``TrainingRows``."""
        chosen, raw = steps_for(self.steps, names)
        table = self.reader.narrowed(raw).read(self.part.rows(places))
        return apply_some(table, self.steps, self.states, chosen)

    def digest(self) -> str:
        """See ``FitRows``."""
        cuts = range(0, len(self), _DIGESTED)
        places = (np.arange(first, min(len(self), first + _DIGESTED), dtype=np.int64) for first in cuts)
        return add_digests([digest_rows(self.part.rows(each)) for each in places])

    def made_by(self, step: AnyStep, state: StepState) -> "StoreFitRows":
        """See ``FitRows``."""
        return replace(self, steps=(*self.steps, step), states=(*self.states, state))

    def left_by(self, step: FilterConfig, state: StepState) -> "StoreFitRows":
        """See ``FitRows``."""
        kept = [np.empty(0, np.int64)]
        for block in block_slices(len(self)):
            rows = self.part.rows(np.arange(block.start, block.stop, dtype=np.int64))
            kept.append(rows[keep_rows(self.read(block.start, block.stop, step.columns), step, state)])
        return replace(self.made_by(step, state), part=RowSelection.of(np.concatenate(kept)))


@dataclass(frozen=True, kw_only=True)
class PreparedStore:
    """The rows of one version, and how a model gets them."""

    reader: StoreReader
    """Of the columns that are needed."""
    columns: ModelColumns
    steps: tuple[AnyStep, ...]
    parts: tuple[RowSelection, RowSelection, RowSelection]
    """Rows of train, validation and test; filters have left training rows out."""
    unknown: tuple[int, int, int]
    """Rows of each part whose label is not in the vocabulary; their target counts for nothing."""
    config: LabelsConfig

    def make(self, rows: Rows) -> tuple[tuple[NDArray[Any], ...], NDArray[Any]]:
        """The inputs and the targets of these rows.

        Raises:
            BrokenFile: a block is gone, torn or altered; names its file.
            RequestError: a value is missing, or is one that a step cannot use.
        """
        own = self.columns
        chosen, reader = self._way
        table = apply_some(reader.read(rows), self.steps, own.fitted.steps, chosen)
        inputs = tuple(tensor_of(table, names, "the store") for names in own.inputs.values())
        if own.space is None:
            return inputs, tensor_of(table, own.targets, "the store", what="target").reshape(len(rows), -1)
        return inputs, own.space.encode(*labels_of(table, own.targets[0], where="the store"))[0]

    @cached_property
    def _way(self) -> tuple[tuple[int, ...], StoreReader]:
        """The steps that inputs and targets come of, by their places, and the reader of what these need."""
        own = self.columns
        wanted = {name for names in own.inputs.values() for name in names} | set(own.targets)
        chosen, raw = steps_for(self.steps, wanted)
        return chosen, self.reader.narrowed(raw)

    def grown(self, reader: StoreReader, origin: str) -> "PreparedStore":
        """With the rows of a newer version behind the training rows; what was fitted stays.

        Raises:
            RunError: a row that was added has a label that the model was not made for, or lacks a value.
        """
        before, own = len(self.reader), self.columns
        rows = StoreFitRows(
            reader=reader.narrowed(own.schema.names), part=RowSelection.of_range(range(before, len(reader)))
        )
        rows = _go_through(rows, self.steps, own.fitted)
        try:
            added_blocks = range(self.reader.num_blocks, reader.num_blocks)
            _refuse_missing(rows, own.inputs, own.targets, f"the rows that {origin} adds", added_blocks)
        except RequestError as error:
            raise RunError(str(error)) from error
        unknown = 0
        if own.space is not None:
            counts = _count_targets(rows, own.targets[0], origin, shards=1)
            strange = sort_labels(set(counts) - set(own.space.names))
            unknown = sum(counts[label] for label in strange)
            if strange and self.config.unknown != "count":
                raise RunError(
                    f"{origin} has {unknown} rows with labels of {own.targets[0]!r} that the model was not made for, "
                    f'{strange[0]!r} the first; train a new model on it, or set data.labels.unknown = "count"'
                )
        train, validation, test = self.parts
        added = rows.part
        whole = RowSelection(np.append(train.starts, added.starts), np.append(train.stops, added.stops))
        return replace(
            self,
            reader=rows.reader,
            parts=(whole if len(added) else train, validation, test),
            unknown=(self.unknown[0] + unknown, *self.unknown[1:]),
        )


def is_prepared(config: StoreConfig, schema: Schema) -> bool:
    """Whether rows go through steps or a vocabulary, and are not taken as they are.

    Raises:
        RequestError: there is no column of the target's name.
    """
    if config.sequence is not None:
        return False
    if config.prepare or config.labels is not None or isinstance(config.inputs, dict):
        return True
    return config.target is not None and schema[config.target].kind == TEXT


def prepare_store(
    config: StoreConfig,
    reader: StoreReader,
    parts: tuple[RowSelection, RowSelection, RowSelection],
    *,
    shards: int,
) -> PreparedStore:
    """Fit the steps, or load what was fitted, and find the labels.

    Args:
        config: of the recipe.
        reader: of its version.
        parts: rows of train, validation and test.
        shards: blocks at work at a time; the bits do not depend on it.

    Raises:
        RequestError: the recipe does not fit the store; names the column or the step, and the fix.
    """
    where, steps = config.path, config.prepare
    targets = config.targets or ((config.target,) if config.target is not None else ())
    named = config.inputs if isinstance(config.inputs, dict) else {"": config.inputs}
    mentioned = {name for names in named.values() for name in names} | {name for step in steps for name in step.columns}
    refuse_unknown_columns(mentioned | set(targets), steps, reader.schema, where)
    _refuse_steps(steps)
    fitted, train = _fit_or_load(config, StoreFitRows(reader=reader, part=parts[0]), shards)
    held_out = [replace(train, part=part) for part in parts[1:]]
    splits = dict(zip(PARTS, (train, *held_out), strict=True))
    made = set().union(*(columns_made(step) for step in steps))
    first = train.take(np.zeros(1, np.int64), (*reader.schema.names, *(made - set(reader.schema.names))))
    if not config.inputs:
        named = {"": tuple(name for name in _numbers_of(first) if name not in targets)}
        if not named[""]:
            raise RequestError("data.inputs names no column, and beside the target there is none of numbers; name one")
    for split, rows in splits.items():
        if len(rows):
            _refuse_missing(rows, named, targets, f"the {split} split", range(reader.num_blocks))
    space, unknown = _find_labels(splits, targets, config.labels or LabelsConfig(), where, shards)
    fitted = replace(fitted, labels={} if space is None else {targets[0]: space.names})
    if config.fitted_digest is not None and fitted.digest != config.fitted_digest:
        raise RequestError(
            f"the steps fitted on {where} have the digest {fitted.digest[:12]}, and those of the run "
            f"{config.fitted_digest[:12]}: the training rows are others than they were; bring the store back, or the folder "
            f"{config.fitted}"
        )
    inputs = [tensor_of(first, names, "the store") for names in named.values()]
    found = np.zeros((1, 1)) if space is not None else tensor_of(first, targets, "the store", what="target")
    spec = describe_columns(inputs[0], found.reshape(1, -1), space, is_named=isinstance(config.inputs, dict))
    columns = ModelColumns(
        spec=spec,
        fitted=fitted,
        space=space,
        schema=raw_schema(reader.schema, named, targets, steps),
        inputs=named,
        targets=targets,
        is_named=isinstance(config.inputs, dict),
    )
    return PreparedStore(
        reader=reader.narrowed(columns.schema.names),
        columns=columns,
        steps=steps,
        parts=(train.part, parts[1], parts[2]),
        unknown=(unknown["train"], unknown["validation"], unknown["test"]),
        config=config.labels or LabelsConfig(),
    )


def _refuse_steps(steps: Sequence[AnyStep]) -> None:
    for place, step in enumerate(steps, 1):
        if isinstance(step, FilterConfig) and step.how not in BY_ROW:
            raise RequestError(
                f"data.prepare, step {place}: the filter {step.how!r} looks at all rows at once, and rows of a store are read a "
                f"block at a time; leave them out of the files before `shoal data build`, or train on the files with "
                'source = "table"'
            )
        if isinstance(step, FillConfig) and step.how == "forward":
            raise RequestError(
                f'data.prepare, step {place}: how = "forward" fills from the row before, and a batch of a store has rows from '
                "all over it; fill before `shoal data build`, or take another way to fill"
            )


@dataclass(frozen=True)
class _Asked:
    """A fit by what it is of: the blocks, the rows and the steps."""

    blocks: bytes
    digest: str
    steps: str
    rows: StoreFitRows = field(compare=False)
    shards: int = field(compare=False)


# A request is looked at before its run begins, and again when the run keeps what was fitted.
@lru_cache(maxsize=1)
def _fit_once(asked: _Asked, steps: tuple[AnyStep, ...]) -> tuple[Fitted, RowSelection]:
    fitted, rows = fit_rows(asked.rows, steps, train_digest=asked.digest, shards=asked.shards)
    return fitted, rows.part


def _fit_or_load(config: StoreConfig, rows: StoreFitRows, shards: int) -> tuple[Fitted, StoreFitRows]:
    digest, steps = rows.digest(), config.prepare
    if config.fitted is None or not (Path(config.fitted) / JSON_NAME).is_file():
        blocks = xxhash.xxh3_128_digest(rows.reader.block_list.digests.tobytes())
        fitted, part = _fit_once(_Asked(blocks, digest, steps_text(steps), rows, shards), steps)
        return fitted, replace(rows, steps=steps, states=fitted.steps, part=part)
    fitted = load_fitted(Path(config.fitted))
    check_steps(steps, fitted)
    if fitted.rows_digest != digest:
        raise RequestError(
            f"the fitted steps in {config.fitted} have seen other rows than those of the training split now (digest "
            f"{fitted.rows_digest[:12]}, now {digest[:12]}); use the version and the split that the run began with, or train anew"
        )
    return fitted, _go_through(rows, steps, fitted)


def _go_through(rows: StoreFitRows, steps: Sequence[AnyStep], fitted: Fitted) -> StoreFitRows:
    """Rows after steps that were fitted; what filters leave out is left out."""
    for step, state in zip(steps, fitted.steps, strict=True):
        rows = rows.left_by(step, state) if isinstance(step, FilterConfig) else rows.made_by(step, state)
    return rows


def _numbers_of(table: Table) -> list[str]:
    return [
        column.field.name
        for column in table.columns
        if not column.field.is_ragged and column.field.dtype.kind in "iufb"
    ]


def _find_labels(
    splits: Mapping[str, StoreFitRows], targets: Sequence[str], config: LabelsConfig, where: str, shards: int
) -> tuple[LabelSpace | None, dict[str, int]]:
    first = splits["train"].take(np.zeros(1, np.int64), targets)
    if not is_label(first.schema[targets[0]], targets):
        return None, dict.fromkeys(splits, 0)
    counts = {
        split: _count_targets(rows, targets[0], f"the {split} split of {where}", shards)
        for split, rows in splits.items()
    }
    return choose_labels(counts, config, what=targets[0], where=where)


def _count_targets(rows: StoreFitRows, target: str, where: str, shards: int) -> Counter[Any]:
    """Rows of each label."""

    def count(table: Table, first: int) -> Counter[Any]:
        return Counter(count_labels(*labels_of(table, target, where=f"{where}, rows from {first + 1} on")))

    def merge(one: Counter[Any], other: Counter[Any]) -> Counter[Any]:
        one.update(other)
        return one

    return fold_groups(rows, (target,), count, merge, shards)


def _refuse_missing(
    rows: StoreFitRows, inputs: Mapping[str, tuple[str, ...]], targets: Sequence[str], where: str, blocks: range
) -> None:
    """Refuse values that are missing after all steps; only columns that may have such, by the statistics of the blocks that the
    rows are in, are looked at.

    Raises:
        RequestError: names the column, and how many.
    """
    lacking = {name for number in blocks for name, found in rows.reader.block_stats(number).items() if found.missing}
    open_ones = _may_miss(rows.steps, lacking)
    wanted = {name for names in inputs.values() for name in names} | set(targets)
    doubtful = sorted(open_ones & wanted)
    if not doubtful:
        return

    for name, there in zip(doubtful, count_values(rows, doubtful).tolist(), strict=True):
        if there < len(rows):
            raise missing_values(name, len(rows) - there, where, "target" if name in targets else "inputs")


def _may_miss(steps: Sequence[AnyStep], missing: set[str]) -> set[str]:
    """The columns that may lack a value after the steps, given those that do before them."""
    found = set(missing)
    for step in steps:
        if isinstance(step, DateConfig):
            found |= {f"{name}_{part}" for name in step.columns if name in found for part in step.parts}
        elif not isinstance(step, FilterConfig | ScaleConfig | BucketConfig):
            found -= columns_made(step)
    return found
