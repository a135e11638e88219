"""Gradients that are summed over replicas by a codec: what every reduction needs for it, with ZeRO and pipelines or without.

Sums are made once, after the last backward pass, when every gradient is there: torch's DDP would start them from its hooks, and
its buckets have no names, so that a residual could not be kept by parameter.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.comm.channel import Channel
from shoal.comm.ordered import has_rank_order, ordered_traffic, sum_in_order_
from shoal.comm.trafficcounter import TrafficCounts, add_traffic
from shoal.compression.config import CompressionConfig
from shoal.compression.dgc import local_clip_norm
from shoal.compression.exchange import CompressedSum
from shoal.compression.layout import Owned, TensorPart
from shoal.core.compressrule import CompressRule
from shoal.core.placement import Shape
from shoal.parallel.gradnorm import clip_, global_norm


@dataclass(frozen=True, kw_only=True)
class Compressing:
    """How gradients are compressed, before it is known which there are."""

    rule: CompressRule
    config: CompressionConfig
    seed: int
    device: torch.device
    clip: float | None = None
    """The norm that gradients are clipped to."""
    allows_untouched: bool = False
    """A parameter may be without a gradient, and stays so where no replica has one."""
    form: "type[CompressedGradients] | None" = None
    """What sums in another way than gradients (``onebit.py``); None for gradients."""

    def build(self, shapes: Mapping[str, Shape], channel: Channel, owned: Owned | None = None) -> "CompressedGradients":
        """The sums over a channel of the gradients of parameters with these shapes."""
        parts = {name: TensorPart(tuple(shape)) for name, shape in shapes.items()}
        sums = CompressedSum(parts, self.rule, self.config, channel, seed=self.seed, device=self.device, owned=owned)
        return (self.form or CompressedGradients)(sums, clip=self.clip, allows_untouched=self.allows_untouched)


class CompressedGradients:
    """The compressed sums of one reduction."""

    def __init__(self, sums: CompressedSum, *, clip: float | None, allows_untouched: bool) -> None:
        self.sums = sums
        self._clip = clip
        self._allows_untouched = allows_untouched

    @property
    def is_compressed(self) -> bool:
        """This step is compressed."""
        return self.sums.is_compressed

    @property
    def clips_by_itself(self) -> bool:
        """Each replica clips its own gradient before it goes into a momentum, and the sum is not clipped (DGC, 1-bit Adam)."""
        return self.sums.rule.kind in ("dgc", "onebit") and self.is_compressed

    def reduce_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace gradients by their sums over replicas, in place."""
        self.clip_own_(gradients)
        self.sums.reduce_(gradients)

    def clip_own_(self, gradients: Mapping[str, Tensor]) -> None:
        """Clip this replica's own gradient, where the method has it so, so that the sum keeps the bound."""
        if self.clips_by_itself and self._clip is not None:
            norm = global_norm(gradients.items(), exact=True, norms=None)
            limit = local_clip_norm(self._clip, self.sums.channel.size)
            if not math.isfinite(norm):
                return
            clip_(gradients.values(), norm=norm, limit=limit, loss_scale=1.0)

    def sum_parameters_(self, parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """Sum the gradients of parameters; one that this replica does not have counts as zeros, and is named in the answer."""
        missing = [name for name, parameter in parameters.items() if parameter.grad is None]
        left_out = set(missing) if self.sums.channel.size == 1 else self._find_untouched(parameters)
        given: MutableMapping[str, Tensor] = {}
        for name, parameter in parameters.items():
            if name not in left_out:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                given[name] = parameter.grad
        self.reduce_(given)
        return missing

    def forecast_traffic(self) -> TrafficCounts:
        """What the last sum should have moved."""
        return add_traffic(self.sums.forecast_traffic(), self._flag_traffic())

    def _find_untouched(self, parameters: Mapping[str, nn.Parameter]) -> set[str]:
        """Parameters that no replica has a gradient of, where that is allowed."""
        if not self._allows_untouched:
            return set()
        told = torch.tensor([float(one.grad is not None) for one in parameters.values()], device=self.sums.device)
        sum_in_order_(told, self.sums.channel)
        return {name for name, num in zip(parameters, told.tolist(), strict=True) if not num}

    def _flag_traffic(self) -> TrafficCounts:
        if not self._allows_untouched or self.sums.owned is not None:
            return {}
        channel = self.sums.channel
        num_bytes = 4 * len(self.sums.parts)
        return ordered_traffic(channel.axis, num_bytes, has_order=has_rank_order(channel), num_ranks=channel.size)


def shapes_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Shape]:
    """The shapes of parameters by name."""
    return {name: tuple(parameter.shape) for name, parameter in parameters}
