"""1-bit Adam (Tang et al. 2021): from a step on, replicas send signs of their momenta in place of gradients.

Until then sums are dense and the optimizer is the plain one. At that step the variance is frozen, with Adam's own correction for
its start, so that the step lengths go on as they were; each replica moves the momentum that all agree on with its own gradient,
and the sum of these is sent as scaled signs with error feedback on both legs. For LAMB the direction is the same and its trust
ratio is taken of it, which is not the scaled frozen coefficient of 1-bit LAMB (Li et al. 2021).
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from shoal.compression.exchange import CompressedSum
from shoal.compression.onebit import move
from shoal.optim.layerwise import Lamb, trust_ratios
from shoal.parallel.compressed import CompressedGradients


class MomentumSums(CompressedGradients):
    """Sums of momenta: after a compressed step ``.grad`` holds the momentum that all replicas agree on."""

    def __init__(self, sums: CompressedSum, *, clip: float | None, allows_untouched: bool) -> None:
        super().__init__(sums, clip=clip, allows_untouched=allows_untouched)
        self.frozen_at = torch.zeros((), dtype=torch.int64)
        """Updates that were taken when the variance was frozen; 0 before."""
        sums.numbers["frozen_at"] = self.frozen_at
        self._optimizer: Optimizer | None = None
        self._names: dict[str, nn.Parameter] = {}
        self._beta1: dict[str, float] = {}

    def attach(self, optimizer: Optimizer, updated: Mapping[str, nn.Parameter]) -> None:
        """Say whose momenta are summed."""
        self._optimizer, self._names = optimizer, dict(updated)
        by_parameter = {id(one): group["betas"][0] for group in optimizer.param_groups for one in group["params"]}
        self._beta1 = {name: by_parameter[id(parameter)] for name, parameter in updated.items()}

    @torch.no_grad()
    def reduce_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace gradients by their sums, or at a compressed step by the momentum that replicas agree on."""
        if not self.is_compressed:
            super().reduce_(gradients)
            return
        self.clip_own_(gradients)
        num_ranks, signed = self.sums.channel.size, self.sums.compressed
        for name, gradient in gradients.items():
            if name in signed:
                gradient.copy_(move(self._momentum(name), gradient * num_ranks, self._beta1[name]))
        self.sums.reduce_(gradients)
        for name, total in gradients.items():
            if name in signed:
                total.div_(num_ranks)
            else:
                total.copy_(move(self._momentum(name), total, self._beta1[name]))

    def _momentum(self, name: str) -> Tensor:
        assert self._optimizer is not None, "attach() comes first"
        return cast(Tensor, self._optimizer.state[self._names[name]]["exp_avg"])

    @torch.no_grad()
    def update(self, optimizer: Optimizer) -> None:
        """A step of the optimizer with the frozen variance, from the momenta in ``.grad``."""
        counts = [optimizer.state[one]["step"] for group in optimizer.param_groups for one in group["params"]]
        if counts and not int(self.frozen_at):
            self.frozen_at.fill_(int(counts[0]))
        for group in optimizer.param_groups:
            names = group.get("param_names") or [str(place) for place in range(len(group["params"]))]
            held = [(name, one) for name, one in zip(names, group["params"], strict=True) if one.grad is not None]
            directions = [self._direction(group, one, optimizer.state[one]) for _, one in held]
            if isinstance(optimizer, Lamb):
                _trust_(optimizer, group, [name for name, _ in held], [one for _, one in held], directions)
            for (_, weight), direction in zip(held, directions, strict=True):
                if isinstance(optimizer, AdamW) and group["weight_decay"]:
                    weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
                weight.sub_(direction.mul_(float(group["lr"])))

    def _direction(self, group: dict[str, Any], weight: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Where Adam goes with this momentum: one operation at a time, each of which rounds once."""
        beta1, beta2 = group["betas"]
        assert weight.grad is not None
        state["step"] += 1
        state["exp_avg"].copy_(weight.grad)
        scale = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2 ** int(self.frozen_at))).add_(group["eps"])
        corrected: Tensor = state["exp_avg"] / (1 - beta1 ** int(state["step"]))
        return corrected.div_(scale)


def _trust_(
    optimizer: Lamb, group: dict[str, Any], names: list[str], weights: list[Tensor], directions: list[Tensor]
) -> None:
    """LAMB's decay and trust ratio, in place; a rank with nothing in a group still takes part where norms are collective."""
    if group["weight_decay"]:
        for weight, direction in zip(weights, directions, strict=True):
            direction.add_(weight * group["weight_decay"])
    if group["adapt"]:
        norms = (optimizer.norms(names, weights), optimizer.norms(names, directions))
        for direction, ratio in zip(directions, trust_ratios(*norms, torch.float32), strict=True):
            direction.mul_(ratio)
