"""Features that are learned from the training rows: principal components and centres of clusters, in passes over blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key
from shoal.data.table import Table
from shoal.data.transform.blocks import TrainingRows, comoments_of_rows, count_values, fold_groups
from shoal.data.transform.config import KmeansConfig, PcaConfig
from shoal.data.transform.matrix import need_full, need_values, numbers, sum_columns, whole_of
from shoal.data.transform.moments import BLOCK, block_slices, map_blocks, merge_tree, spread_rows
from shoal.data.transform.state import StepState

Matrix = NDArray[np.float64]


def fit_pca(rows: TrainingRows, config: PcaConfig, shards: int) -> StepState:
    """The mean, and the directions by falling variance; the largest number of each is positive.

    Raises:
        RequestError: a value is missing, or more directions are asked for than there are columns.
    """
    names = config.columns
    _need_all(rows, names, step="pca", shards=shards)
    if config.components > len(names):
        raise RequestError(
            f"data.prepare, step 'pca': {config.components} components of {len(names)} columns; ask for fewer"
        )
    moments = comoments_of_rows(
        rows, names, lambda table, first: whole_of(table, names, step="pca", first=first), shards
    )
    _, vectors = np.linalg.eigh(moments.c2)
    directions = vectors[:, ::-1][:, : config.components].T
    largest = np.take_along_axis(directions, np.abs(directions).argmax(axis=1)[:, None], axis=1)
    return StepState(arrays={"mean": moments.mean, "directions": np.ascontiguousarray(directions * np.sign(largest))})


def apply_pca(table: Table, config: PcaConfig, state: StepState) -> Table:
    """The rows in the new directions, beside their columns."""
    values = whole_of(table, config.columns, step="pca")
    apart = values - state.arrays["mean"]
    made = np.stack([sum_columns(apart * direction) for direction in state.arrays["directions"]], axis=1)
    return table.replace({config.to: numbers(config.to, made)})


def fit_kmeans(rows: TrainingRows, config: KmeansConfig, shards: int) -> StepState:
    """Centres: rows far from each other at first, then means of what is nearest, until nothing moves.

    Raises:
        RequestError: a value is missing, or there are fewer rows than centres.
    """
    names = config.columns
    _need_all(rows, names, step="kmeans", shards=shards)
    if len(rows) < config.clusters:
        raise RequestError(
            f"data.prepare, step 'kmeans': {config.clusters} clusters of {len(rows)} training rows; ask for fewer"
        )
    spread = whole_of(rows.take(spread_rows(len(rows), BLOCK), names), names, step="kmeans")
    centres = first_centres(spread, config.clusters, config.seed)
    for _ in range(config.rounds):
        current = centres

        def sums(table: Table, first: int, current: Matrix = current) -> tuple[Matrix, Matrix]:
            values = whole_of(table, names, step="kmeans", first=first)
            return merge_tree(map_blocks(lambda rows: _sums(values[rows], current), len(values)), _add)

        total, count = fold_groups(rows, names, sums, _add, shards)
        centres = np.where(count[:, None] > 0, total / np.maximum(count, 1)[:, None], current)
        if np.array_equal(centres, current):
            break
    return StepState(arrays={"centres": centres})


def _sums(part: Matrix, centres: Matrix) -> tuple[Matrix, Matrix]:
    """The sums and numbers of a block's rows by their nearest centre; rows are added one after another in their order."""
    nearest = nearest_of(part, centres)
    columns = [np.bincount(nearest, column, minlength=len(centres)) for column in part.T]
    return np.stack(columns, axis=1), np.bincount(nearest, minlength=len(centres)).astype(np.float64)


def _add(one: tuple[Matrix, Matrix], other: tuple[Matrix, Matrix]) -> tuple[Matrix, Matrix]:
    return one[0] + other[0], one[1] + other[1]


def _need_all(rows: TrainingRows, names: Sequence[str], *, step: str, shards: int) -> None:
    count = count_values(rows, names, shards)
    need_values(count, names, step=step, num_rows=len(rows))
    need_full(count, names, step=step, num_rows=len(rows))


def first_centres(rows: Matrix, clusters: int, seed: int) -> Matrix:
    """Rows drawn with a chance that grows with the squared distance from those before (k-means++)."""
    draws = np.random.Generator(np.random.Philox(key=derive_key("kmeans", seed)))
    chosen = [int(draws.integers(len(rows)))]
    nearest = ((rows - rows[chosen[0]]) ** 2).sum(axis=1)
    while len(chosen) < min(clusters, len(rows)):
        total = np.cumsum(nearest)
        place = int(np.searchsorted(total, draws.random() * total[-1], side="right")) if total[-1] > 0 else len(chosen)
        chosen.append(min(place, len(rows) - 1))
        nearest = np.minimum(nearest, ((rows - rows[chosen[-1]]) ** 2).sum(axis=1))
    return rows[chosen].copy()


def nearest_of(values: Matrix, centres: Matrix) -> NDArray[np.int64]:
    """The nearest centre of every row; the first of those equally near, where rounding leaves them so.

    The square of the distance is |x|^2 - 2 (x.c - |c|^2 / 2), so the nearest centre is that of the greatest bracket. Everything
    is taken from the middle of the centres, which keeps the numbers small beside their differences.
    """
    middle = centres.sum(axis=0) / len(centres)
    near = centres - middle
    half = (near * near).sum(axis=1, keepdims=True) / 2
    kind = np.min_scalar_type(len(centres))
    nearest = np.empty(len(values), dtype=np.int64)
    # So many rows at a time that what is computed of them stays in the processor's cache.
    for rows in block_slices(len(values)):
        # Column by column: a row's bits do not depend on how many rows there are.
        columns = np.ascontiguousarray((values[rows] - middle).T)
        found, product = np.repeat(-half, columns.shape[1], axis=1), np.empty((len(centres), columns.shape[1]))
        for weights, column in zip(near.T, columns, strict=True):
            found += np.multiply(weights[:, None], column, out=product)
        best, part = found[0], np.zeros(found.shape[1], dtype=kind)
        for number in range(1, len(centres)):
            is_nearer = (found[number] > best).astype(kind)
            # Centres come in rising order, so the greatest number of one that was nearer than those before is the nearest.
            np.maximum(part, is_nearer * kind.type(number), out=part)
            np.maximum(best, found[number], out=best)
        nearest[rows] = part
    return nearest


def apply_kmeans(table: Table, config: KmeansConfig, state: StepState) -> Table:
    """The nearest centre, as a column beside the others."""
    values = whole_of(table, config.columns, step="kmeans")
    return table.replace({config.to: numbers(config.to, nearest_of(values, state.arrays["centres"]))})
