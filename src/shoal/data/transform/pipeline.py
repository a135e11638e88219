"""All steps together: fitted one after another on the training rows, and applied by one function everywhere else."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError, RunError
from shoal.data.partition.keys import Codes, digest_rows
from shoal.data.table import Table
from shoal.data.transform import features, filling, images, learned, scaling
from shoal.data.transform.blocks import TrainingRows
from shoal.data.transform.config import (
    AnyStep,
    BucketConfig,
    DateConfig,
    FillConfig,
    FilterConfig,
    HashConfig,
    ImageConfig,
    KmeansConfig,
    NgramsConfig,
    PcaConfig,
    ScaleConfig,
    VocabularyConfig,
)
from shoal.data.transform.filters import fit_filter, keep_rows
from shoal.data.transform.state import Fitted, StepState

Fit = TypeVar("Fit", bound="FitRows")


class FitRows(TrainingRows, Protocol):
    """Training rows that can go through a step."""

    def digest(self) -> str:
        """Of the rows' numbers in the dataset."""

    def made_by(self, step: AnyStep, state: StepState) -> Self:
        """The rows after a step."""

    def left_by(self, step: FilterConfig, state: StepState) -> Self:
        """The rows that a filter does not leave out."""


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Training rows in memory, made by each step as a whole."""

    table: Table
    numbers: Codes
    """Of the rows in the dataset."""
    is_in_memory: bool = True

    def __post_init__(self) -> None:
        assert len(self.table) == len(self.numbers), "every row has its number"

    def __len__(self) -> int:
        return len(self.table)

    def read(self, start: int, stop: int, names: Sequence[str]) -> Table:
        """See ``TrainingRows``."""
        return self.table.slice(start, stop)

    def take(self, places: NDArray[np.int64], names: Sequence[str]) -> Table:
        """See ``TrainingRows``."""
        return self.table.take(places)

    def digest(self) -> str:
        """See ``FitRows``."""
        return digest_rows(self.numbers)

    def made_by(self, step: AnyStep, state: StepState) -> "TableRows":
        """See ``FitRows``."""
        return replace(self, table=_apply(self.table, step, state, is_training=True))

    def left_by(self, step: FilterConfig, state: StepState) -> "TableRows":
        """See ``FitRows``."""
        kept = np.flatnonzero(keep_rows(self.table, step, state))
        return replace(self, table=self.table.take(kept), numbers=self.numbers[kept])


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A fit, and the training rows as the steps have made them."""

    fitted: Fitted
    train: Table
    rows: Codes
    """Numbers of the rows that no filter has left out."""


def fit_steps(table: Table, rows: Codes, steps: Sequence[AnyStep], *, train_digest: str, shards: int = 1) -> FitResult:
    """Fit all steps on training rows in memory; see ``fit_rows``.

    Args:
        table: the training rows.
        rows: their numbers in the dataset.
        steps: what to do, in order.
        train_digest: of the training side of the cut, by its certificate; other rows are refused.
        shards: blocks at work at a time; the bits do not depend on it.

    Raises:
        RunError: the rows are not those of the training side.
        RequestError: a step cannot be fitted; names the column.
    """
    fitted, made = fit_rows(TableRows(table=table, numbers=rows), steps, train_digest=train_digest, shards=shards)
    return FitResult(fitted=fitted, train=made.table, rows=made.numbers)


def fit_rows(rows: Fit, steps: Sequence[AnyStep], *, train_digest: str, shards: int = 1) -> tuple[Fitted, Fit]:
    """Fit all steps on the training rows, wherever they lie.

    Args:
        rows: the training rows.
        steps: what to do, in order.
        train_digest: of the training side, by its certificate; other rows are refused.
        shards: blocks at work at a time; the bits do not depend on it.

    Returns:
        What was learned, and the rows as the steps have made them.

    Raises:
        RunError: the rows are not those of the training side: nothing may be learned from what is held out.
        RequestError: a step cannot be fitted; names the column.
    """
    digest = rows.digest()
    if digest != train_digest:
        raise RunError(
            f"a fit was asked for on {len(rows)} rows with the digest {digest[:12]}, and the training side has "
            f"{train_digest[:12]}: transforms are fitted on training rows only"
        )
    states = []
    for place, step in enumerate(steps):
        state = _fit(rows, step, shards)
        if isinstance(step, FilterConfig):
            before, rows = len(rows), rows.left_by(step, state)
            if not len(rows):
                raise RequestError(
                    f"data.prepare, step {place + 1} ({step.how}) leaves none of {before} training rows; loosen it"
                )
            state = replace(state, values={"rows_before": before, "rows_after": len(rows)})
        else:
            rows = rows.made_by(step, state)
        states.append(state)
    return Fitted(steps=tuple(states), rows_digest=digest, num_rows=len(rows), recipe=steps_text(steps)), rows


def apply_steps(table: Table, steps: Sequence[AnyStep], fitted: Fitted, *, is_training: bool = False) -> Table:
    """Rows as the model is to see them: what training, evaluation and exports all call.

    Args:
        table: rows as they were read.
        steps: the recipe's.
        fitted: what was learned from the training rows.
        is_training: whether they are training rows: filters leave some out, and nothing is filled from the last of them.

    Raises:
        RequestError: the state is of other steps.
    """
    check_steps(steps, fitted)
    for step, state in zip(steps, fitted.steps, strict=True):
        if isinstance(step, FilterConfig):
            if is_training:
                table = table.take(np.flatnonzero(keep_rows(table, step, state)))
            continue
        table = _apply(table, step, state, is_training=is_training)
    return table


def check_steps(steps: Sequence[AnyStep], fitted: Fitted) -> None:
    """Refuse a state of other steps.

    Raises:
        RequestError: the recipe was changed since the fit.
    """
    if fitted.recipe != steps_text(steps):
        raise RequestError(
            "the fitted transforms are of other steps than data.prepare has now; train again, or restore the recipe"
        )


def steps_text(steps: Sequence[AnyStep]) -> str:
    """The steps as one text, to be compared."""
    return json.dumps([step.model_dump(mode="json") for step in steps], sort_keys=True)


def steps_for(steps: Sequence[AnyStep], names: Iterable[str]) -> tuple[tuple[int, ...], frozenset[str]]:
    """The steps that some columns come of, by their places, and the columns that these need as they are read."""
    wanted, places = set(names), []
    for place in reversed(range(len(steps))):
        step = steps[place]
        if not isinstance(step, FilterConfig) and wanted & columns_made(step):
            # What a step makes anew is not read; what it changes is.
            wanted = (wanted - (columns_made(step) - set(step.columns))) | set(step.columns)
            places.append(place)
    return tuple(reversed(places)), frozenset(wanted)


def columns_made(step: AnyStep) -> set[str]:
    """The columns that a step makes or changes."""
    if isinstance(step, FilterConfig):
        return set()
    if isinstance(step, PcaConfig | KmeansConfig):
        return {step.to}
    if isinstance(step, DateConfig):
        return {f"{name}_{part}" for name in step.columns for part in step.parts}
    return set(step.columns)


def apply_some(table: Table, steps: Sequence[AnyStep], fitted: Sequence[StepState], places: Sequence[int]) -> Table:
    """Rows after the steps at these places, none of which is a filter; each row by itself."""
    for place in places:
        table = _apply(table, steps[place], fitted[place], is_training=False)
    return table


def _fit(rows: TrainingRows, step: AnyStep, shards: int) -> StepState:
    if isinstance(step, FillConfig):
        return filling.fit(rows, step, shards)
    if isinstance(step, ScaleConfig):
        return scaling.fit(rows, step, shards)
    if isinstance(step, VocabularyConfig):
        return features.fit_vocabulary(rows, step, shards)
    if isinstance(step, BucketConfig):
        return features.fit_bucket(rows, step, shards)
    if isinstance(step, PcaConfig):
        return learned.fit_pca(rows, step, shards)
    if isinstance(step, KmeansConfig):
        return learned.fit_kmeans(rows, step, shards)
    if isinstance(step, FilterConfig):
        return fit_filter(rows, step, shards)
    return StepState()


def _apply(table: Table, step: AnyStep, state: StepState, *, is_training: bool) -> Table:
    if isinstance(step, FillConfig):
        return filling.apply(table, step, state, is_training=is_training)
    if isinstance(step, ScaleConfig):
        return scaling.apply(table, step, state)
    if isinstance(step, HashConfig):
        return features.apply_hash(table, step, state)
    if isinstance(step, VocabularyConfig):
        return features.apply_vocabulary(table, step, state)
    if isinstance(step, BucketConfig):
        return features.apply_bucket(table, step, state)
    if isinstance(step, DateConfig):
        return features.apply_date(table, step, state)
    if isinstance(step, NgramsConfig):
        return features.apply_ngrams(table, step, state)
    if isinstance(step, ImageConfig):
        return images.apply(table, step)
    if isinstance(step, PcaConfig):
        return learned.apply_pca(table, step, state)
    assert isinstance(step, KmeansConfig), "filters are not applied here"
    return learned.apply_kmeans(table, step, state)
