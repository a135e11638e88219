"""Embeddings whose gradient torch gives as the rows that were looked up (``sparse=True``).

Everywhere gradients are added up dense: the rows of torch are added in another order, and norms and fused optimizers take none.
Workers of parameter servers find the touched rows in the sum, and send these alone.
"""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from shoal.core.errors import Refusal


def row_tables(model: nn.Module) -> Iterator[nn.Embedding | nn.EmbeddingBag]:
    """The embeddings with ``sparse=True``."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module


def make_dense(model: nn.Module) -> None:
    """Have every embedding give its whole gradient: the same rows, and zeros between them."""
    for module in row_tables(model):
        module.sparse = False


def refuse_rows(model: nn.Module) -> None:
    """Have the first backward pass refuse a gradient that comes as rows all the same: from ``F.embedding`` in a module's forward.

    That is a call and no module, so nothing shows it before. Torch fails on it later, in words of its own.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _watch_first(name, parameter)


def _watch_first(name: str, parameter: nn.Parameter) -> None:
    @unserializable_hook  # type: ignore[untyped-decorator]
    def look(gradient: Tensor) -> None:
        handle.remove()
        if gradient.is_sparse:
            raise Refusal(
                f"the gradient of parameter {name!r} comes as rows, and gradients are added up whole; call F.embedding with "
                f"sparse=False, or use nn.Embedding, of which Shoal sees to it"
            )

    handle = parameter.register_hook(look)  # type: ignore[no-untyped-call]
