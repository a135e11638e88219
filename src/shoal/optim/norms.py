"""Norms of whole tensors from float64 sums of squares per row, so that sharding changes no bit of them.

A rank that holds only some rows (dim 0) of a tensor gets the very same sums for them as a rank that holds all; put together in
row order they give the same norm. ``torch.linalg.vector_norm`` cannot promise it: how it splits its sum depends on the size of
what it is given.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Rows become float64 in blocks of about this many elements (8 MiB), so that a large embedding needs no second copy of itself.
_BLOCK_ELEMENTS = 1 << 20


def square_sums(tensor: Tensor) -> Tensor:
    """The float64 sum of squares of each row; a tensor without dims is one row."""
    matrix = tensor.detach()
    matrix = matrix.flatten(1) if matrix.ndim > 1 else matrix.reshape(-1, 1)
    num_rows, num_columns = matrix.shape
    block = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
    if num_rows == 0:
        return matrix.new_zeros(0, dtype=torch.float64)
    starts = range(0, num_rows, block)
    return torch.cat([_block_sums(matrix[start : start + block]) for start in starts])


def _block_sums(rows: Tensor) -> Tensor:
    # to(copy=True): squaring happens in place, and a float64 gradient must not be squared with it.
    squares = rows.to(torch.float64, copy=True).square_()
    if squares.shape[0] > 1:
        return squares.sum(dim=1)
    # torch splits a sum that has a single result over its threads, and then that row would differ from the same row among others.
    return squares.expand(2, -1).sum(dim=1)[:1]


def whole_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The float64 norm of each tensor, on the tensors' device and without waiting for it."""
    return torch.stack([square_sums(tensor).sum() for tensor in tensors]).sqrt_()
