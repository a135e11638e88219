"""PowerSGD (Vogels et al. 2019, algorithm 1): a matrix as the product of two thin ones, by one step of power iteration.

Between ``multiply_left`` and ``orthogonalise``, and after ``multiply_right``, the caller sums over the replicas; these functions
do no more than the arithmetic. Q is kept from step to step (warm start), so that the iteration goes on where it was.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.compression.keyed import draw_uniform

# A column of which so little is left once the others are taken out is rounding, not direction.
_DEPENDENT = 1e-6


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """A tensor read as a matrix, (first dim, all others); None where it is none."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else None


def factor_bytes(rows: int, cols: int, rank: int) -> int:
    """Bytes of both factors, in float32; a rank above the matrix's own sides is cut to them."""
    return 4 * (rows + cols) * min(rank, rows, cols)


def is_worth(shape: Sequence[int], rank: int, *, min_rate: float = 2.0) -> bool:
    """True when the factors take less than the matrix's bytes over ``min_rate``."""
    matrix = matrix_shape(shape)
    return matrix is not None and factor_bytes(*matrix, rank) * min_rate < 4 * math.prod(matrix)


def start_right(cols: int, rank: int, key: int, device: torch.device | None = None) -> Tensor:
    """The first Q, (cols, rank): the same on every replica that has the key."""
    return draw_uniform(key, 0, cols * rank, device).view(cols, rank).sub_(0.5)


def revive_right(right: Tensor, key: int) -> Tensor:
    """Q for the next step: a column that became zero would stay zero for ever, so it starts anew."""
    dead = (right == 0).all(0)
    return torch.where(dead, start_right(right.shape[0], right.shape[1], key, right.device), right)


def multiply_left(matrix: Tensor, right: Tensor) -> Tensor:
    """P = M Q, (rows, rank); to be averaged over the replicas."""
    return matrix @ right


def orthogonalise(left: Tensor) -> Tensor:
    """P with orthonormal columns, by Gram-Schmidt in float64, each column twice; a dependent column becomes zero."""
    basis = left.to(torch.float64)
    for index in range(basis.shape[1]):
        column, before = basis[:, index], basis[:, :index]
        size = column.norm()
        for _ in range(2):
            column = column - before @ (before.T @ column)
        rest = column.norm()
        basis[:, index] = torch.where(rest <= _DEPENDENT * size, torch.zeros_like(column), column / rest)
    return basis.to(left.dtype)


def multiply_right(matrix: Tensor, left: Tensor) -> Tensor:
    """Q = M^T P, (cols, rank), of an orthonormal P; to be averaged over the replicas."""
    return matrix.T @ left


def product(left: Tensor, right: Tensor) -> Tensor:
    """What is taken for the matrix: P Q^T, (rows, cols)."""
    return left @ right.T
