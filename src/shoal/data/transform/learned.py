"""Features that are learned from the training rows: principal components and centres of clusters, in passes over blocks."""

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key
from shoal.data.table import Table
from shoal.data.transform.config import KmeansConfig, PcaConfig
from shoal.data.transform.matrix import need_some, numbers, whole_of
from shoal.data.transform.moments import BLOCK, block_slices, comoments_of, map_blocks, merge_tree, spread_rows
from shoal.data.transform.state import StepState

Matrix = NDArray[np.float64]


def fit_pca(table: Table, config: PcaConfig, shards: int) -> StepState:
    """The mean, and the directions by falling variance; the largest number of each is positive.

    Raises:
        RequestError: a value is missing, or more directions are asked for than there are columns.
    """
    values = whole_of(table, config.columns, step="pca")
    need_some(None, config.columns, step="pca", num_rows=len(values))
    if config.components > len(config.columns):
        raise RequestError(
            f"data.prepare, step 'pca': {config.components} components of {len(config.columns)} columns; ask for fewer"
        )
    moments = comoments_of(values, shards)
    _, vectors = np.linalg.eigh(moments.c2)
    directions = vectors[:, ::-1][:, : config.components].T
    largest = np.take_along_axis(directions, np.abs(directions).argmax(axis=1)[:, None], axis=1)
    return StepState(arrays={"mean": moments.mean, "directions": np.ascontiguousarray(directions * np.sign(largest))})


def apply_pca(table: Table, config: PcaConfig, state: StepState) -> Table:
    """The rows in the new directions, beside their columns."""
    values = whole_of(table, config.columns, step="pca")
    made = np.einsum("rc,dc->rd", values - state.arrays["mean"], state.arrays["directions"])
    return table.replace({config.to: numbers(config.to, made)})


def fit_kmeans(table: Table, config: KmeansConfig, shards: int) -> StepState:
    """Centres: rows far from each other at first, then means of what is nearest, until nothing moves.

    Raises:
        RequestError: a value is missing, or there are fewer rows than centres.
    """
    values = whole_of(table, config.columns, step="kmeans")
    need_some(None, config.columns, step="kmeans", num_rows=len(values))
    if len(values) < config.clusters:
        raise RequestError(
            f"data.prepare, step 'kmeans': {config.clusters} clusters of {len(values)} training rows; ask for fewer"
        )
    centres = first_centres(values[spread_rows(len(values), BLOCK)], config.clusters, config.seed)
    for _ in range(config.rounds):
        current = centres

        def sums(rows: slice, current: Matrix = current) -> tuple[Matrix, Matrix]:
            part = values[rows]
            nearest = nearest_of(part, current)
            # Rows are added one after another in their order.
            columns = [np.bincount(nearest, column, minlength=len(current)) for column in part.T]
            return np.stack(columns, axis=1), np.bincount(nearest, minlength=len(current)).astype(np.float64)

        total, count = merge_tree(
            map_blocks(sums, len(values), shards), lambda one, two: (one[0] + two[0], one[1] + two[1])
        )
        centres = np.where(count[:, None] > 0, total / np.maximum(count, 1)[:, None], current)
        if np.array_equal(centres, current):
            break
    return StepState(arrays={"centres": centres})


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
        # einsum without BLAS: its order does not depend on threads.
        found = np.einsum("kc,cr->kr", near, np.ascontiguousarray((values[rows] - middle).T)) - half
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
