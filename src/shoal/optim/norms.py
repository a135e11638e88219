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
    return _row_sums(_rows_of(tensor), None)


def product_sums(left: Tensor, right: Tensor) -> Tensor:
    """The float64 sum of products of each row of two tensors of one shape: row by row, their dot product."""
    return _row_sums(_rows_of(left), _rows_of(right))


def _rows_of(tensor: Tensor) -> Tensor:
    matrix = tensor.detach()
    return matrix.flatten(1) if matrix.ndim > 1 else matrix.reshape(-1, 1)


def _row_sums(left: Tensor, right: Tensor | None) -> Tensor:
    num_rows, num_columns = left.shape
    block = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
    if num_rows == 0:
        return left.new_zeros(0, dtype=torch.float64)
    ranges = [slice(start, start + block) for start in range(0, num_rows, block)]
    return torch.cat([_block_sums(left[rows], None if right is None else right[rows]) for rows in ranges])


def _block_sums(left: Tensor, right: Tensor | None) -> Tensor:
    # to(copy=True): multiplying happens in place, and a float64 gradient must not be changed with it.
    products = left.to(torch.float64, copy=True)
    products = products.square_() if right is None else products.mul_(right)
    if products.shape[0] > 1:
        return products.sum(dim=1)
    # torch splits a sum that has a single result over its threads, and then that row would differ from the same row among others.
    return products.expand(2, -1).sum(dim=1)[:1]


def whole_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The float64 norm of each tensor, on the tensors' device and without waiting for it."""
    return torch.stack([square_sums(tensor).sum() for tensor in tensors]).sqrt_()
