"""All steps together: fitted one after another on the training rows, and applied by one function everywhere else."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import RequestError, RunError
from shoal.data.partition.keys import Codes, digest_rows
from shoal.data.table import Table
from shoal.data.transform import features, filling, images, learned, scaling
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
from shoal.data.transform.filters import keep_rows
from shoal.data.transform.state import Fitted, StepState


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A fit, and the training rows as the steps have made them."""

    fitted: Fitted
    train: Table
    rows: Codes
    """Numbers of the rows that no filter has left out."""


def fit_steps(table: Table, rows: Codes, steps: Sequence[AnyStep], *, train_digest: str, shards: int = 1) -> FitResult:
    """Fit all steps on the training rows.

    Args:
        table: the training rows.
        rows: their numbers in the dataset.
        steps: what to do, in order.
        train_digest: of the training side of the cut, by its certificate; other rows are refused.
        shards: blocks at work at a time; the bits do not depend on it.

    Raises:
        RunError: the rows are not those of the training side: nothing may be learned from what is held out.
        RequestError: a step cannot be fitted; names the column.
    """
    digest = digest_rows(rows)
    if digest != train_digest or len(rows) != len(table):
        raise RunError(
            f"a fit was asked for on {len(rows)} rows with the digest {digest[:12]}, and the training side has "
            f"{train_digest[:12]}: "
            "transforms are fitted on training rows only"
        )
    states = []
    for place, step in enumerate(steps):
        if isinstance(step, FilterConfig):
            keep = keep_rows(table, step, shards)
            if not keep.any():
                raise RequestError(
                    f"data.prepare, step {place + 1} ({step.how}) leaves none of {len(table)} training rows; loosen it"
                )
            kept = np.flatnonzero(keep)
            states.append(StepState(values={"rows_before": len(table), "rows_after": len(kept)}))
            table, rows = table.take(kept), rows[kept]
            continue
        state = _fit(table, step, shards)
        states.append(state)
        table = _apply(table, step, state, is_training=True)
    fitted = Fitted(steps=tuple(states), rows_digest=digest, num_rows=len(rows), recipe=steps_text(steps))
    return FitResult(fitted=fitted, train=table, rows=rows)


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
    if fitted.recipe != steps_text(steps):
        raise RequestError(
            "the fitted transforms are of other steps than data.prepare has now; train again, or restore the recipe"
        )
    for step, state in zip(steps, fitted.steps, strict=True):
        if isinstance(step, FilterConfig):
            if is_training:
                table = table.take(np.flatnonzero(keep_rows(table, step)))
            continue
        table = _apply(table, step, state, is_training=is_training)
    return table


def steps_text(steps: Sequence[AnyStep]) -> str:
    """The steps as one text, to be compared."""
    return json.dumps([step.model_dump(mode="json") for step in steps], sort_keys=True)


def _fit(table: Table, step: AnyStep, shards: int) -> StepState:
    if isinstance(step, FillConfig):
        return filling.fit(table, step, shards)
    if isinstance(step, ScaleConfig):
        return scaling.fit(table, step, shards)
    if isinstance(step, VocabularyConfig):
        return features.fit_vocabulary(table, step, shards)
    if isinstance(step, BucketConfig):
        return features.fit_bucket(table, step, shards)
    if isinstance(step, PcaConfig):
        return learned.fit_pca(table, step, shards)
    if isinstance(step, KmeansConfig):
        return learned.fit_kmeans(table, step, shards)
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
