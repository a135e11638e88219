"""Embeddings whose gradient torch gives as the rows that were looked up (``sparse=True``).

Everywhere gradients are added up dense: the rows of torch are added in another order, and norms and fused optimizers take none.
Workers of parameter servers find the touched rows in the sum, and send these alone.
"""

from collections.abc import Iterator

from torch import nn


def row_tables(model: nn.Module) -> Iterator[nn.Embedding | nn.EmbeddingBag]:
    """The embeddings with ``sparse=True``."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module


def make_dense(model: nn.Module) -> None:
    """Have every embedding give its whole gradient: the same rows, and zeros between them."""
    for module in row_tables(model):
        module.sparse = False
