"""A worker's model in one row: weights and gradients lie as the servers' shards do, so that a shard is a slice of either."""

from collections.abc import Mapping

import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.paramserver.cutting import ShardMap, TensorSpec, check_cover
from shoal.trainer.portion import trained_parameters


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


class FlatModel:
    """The trained parameters of a model, moved into one row.

    Args:
        model: its parameters become views of ``weights``.
        shard_map: how the row is cut.
    """

    def __init__(self, model: nn.Module, shard_map: ShardMap) -> None:
        check_cover(shard_map, describe_model(model))
        self.shard_map = shard_map
        self._parameters = trained_parameters(model)
        sizes = [shard.numel for shard in shard_map.shards]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        self.stretches = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        """Of each shard in the row."""
        first = next(iter(self._parameters.values()))
        self.weights = torch.empty(ends[-1], dtype=first.dtype)
        self.gradient = torch.zeros_like(self.weights)
        self._places = self._find_places(shard_map)
        for name, parameter in self._parameters.items():
            view = self.weights[self._places[name]].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view

    def _find_places(self, shard_map: ShardMap) -> Mapping[str, slice]:
        places: dict[str, slice] = {}
        for shard, stretch in zip(shard_map.shards, self.stretches, strict=True):
            for piece in shard.pieces:
                start = stretch.start + piece.offset - piece.start
                found = slice(start, start + self._parameters[piece.name].numel())
                assert places.setdefault(piece.name, found) == found, f"{piece.name} does not lie in one stretch"
        for name, parameter in self._parameters.items():
            places.setdefault(name, slice(0, parameter.numel()))
        return places

    def collect_gradient(self) -> torch.Tensor:
        """The gradients of the backward pass that was, in the row; what no sample touched is zero."""
        for name, parameter in self._parameters.items():
            place = self.gradient[self._places[name]]
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(parameter.grad.reshape(-1))
        return self.gradient
