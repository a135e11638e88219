"""A worker's model in one row: weights and gradients lie as the servers' shards do, so that a shard is a slice of either."""

from collections.abc import Mapping

import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.models.embeddings import row_tables
from shoal.paramserver.sharding import Model, ShardMap, TensorSpec, check_cover


def trained_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the servers hold, by name in the order of names."""
    return dict(sorted((name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad))


def describe_model(model: nn.Module) -> dict[str, TensorSpec]:
    """Shape and type of every trained parameter, by name."""
    return {
        name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in trained_parameters(model).items()
    }


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse running statistics: they are no gradient, so no server would have them.

    Raises:
        RequestError: names the layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise RequestError(
                f"batch norm {name!r} keeps running statistics, which parameter servers do not hold; "
                f"use a plan with dp, or a norm without them such as GroupNorm"
            )


def sparse_parameters(model: nn.Module) -> frozenset[str]:
    """Trained parameters of embeddings with ``sparse=True``, by name; asked before ``make_dense``."""
    tables = {id(module.weight) for module in row_tables(model)}
    return frozenset(name for name, tensor in trained_parameters(model).items() if id(tensor) in tables)


class FlatParameters:
    """Weights and gradients of a whole model, one row each.

    Args:
        model: the trained parameters.
        shard_map: how the rows are cut.
        sparse: parameters of which a work unit touches few rows (``sparse_parameters``).
    """

    def __init__(self, model: Model, shard_map: ShardMap, sparse: frozenset[str] = frozenset()) -> None:
        check_cover(shard_map, model)
        self.model = model
        self.shard_map = shard_map
        sizes = [shard.numel for shard in shard_map.shards]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        self.spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        """Of each shard in the row."""
        self._places = self._find_places()
        self.sparse = sparse
        """Parameters whose gradient is sent as rows."""
        self.weights = torch.zeros(ends[-1], dtype=getattr(torch, shard_map.dtype))
        self.gradient = torch.zeros_like(self.weights)

    def whole(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every parameter's slice of a row, in the parameter's shape; not a copy."""
        return {name: row[place].view(self.model[name].shape) for name, place in self._places.items()}

    def collect_gradient(self) -> torch.Tensor:
        """The gradients of the backward pass that was, in the row."""
        return self.gradient

    def _find_places(self) -> Mapping[str, slice]:
        places: dict[str, slice] = {}
        for shard, span in zip(self.shard_map.shards, self.spans, strict=True):
            for piece in shard.pieces:
                start = span.start + piece.offset - piece.start
                found = slice(start, start + self.model[piece.name].numel)
                assert places.setdefault(piece.name, found) == found, f"{piece.name} does not lie in one slice"
        return {name: places.get(name, slice(0, spec.numel)) for name, spec in self.model.items()}


class FlatModel(FlatParameters):
    """The trained parameters of a model that is whole on this process, moved into one row.

    Args:
        model: its parameters become views of ``weights``.
        shard_map: how the row is cut.
        sparse: as of ``FlatParameters``.
    """

    def __init__(self, model: nn.Module, shard_map: ShardMap, sparse: frozenset[str] = frozenset()) -> None:
        super().__init__(describe_model(model), shard_map, sparse)
        self._parameters = trained_parameters(model)
        for name, view in self.whole(self.weights).items():
            view.copy_(self._parameters[name].detach())
            self._parameters[name].data = view

    def collect_gradient(self) -> torch.Tensor:
        """The gradients of the backward pass that was, in the row; what no sample touched is zero."""
        for name, place in self.whole(self.gradient).items():
            grad = self._parameters[name].grad
            if grad is None:
                place.zero_()
            else:
                place.copy_(grad)
        return self.gradient
