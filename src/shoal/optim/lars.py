"""LARS: momentum SGD in which every tensor moves by a fraction of its own norm, for batches of many thousands.

You, Gitman & Ginsburg 2017, "Large Batch Training of Convolutional Networks" (arXiv:1708.03888), equation 6 and algorithm 1.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.rows import whole_norms
from shoal.optim.trust import scaled_sum, trust_ratios


class Lars(Optimizer):
    """LARS over groups that say ``adapt``: False means plain momentum, as is usual for biases and norms."""

    def __init__(self, groups: Any, *, lr: float, momentum: float, weight_decay: float, trust: float) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": True}
        super().__init__(groups, defaults)

    def create_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has not been stepped."""
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            weights = [weight for weight in cast(list[Tensor], group["params"]) if weight.grad is not None]
            if weights:
                self._step_group(group, weights)
        return loss

    def _step_group(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = self.create_state(weight)
        gradients = [cast(Tensor, weight.grad) for weight in weights]
        velocities = [self.state[weight]["momentum_buffer"] for weight in weights]
        decay = group["weight_decay"]
        # Algorithm 1: v <- m v + gamma lambda (g + beta w).
        moves = scaled_sum(gradients, weights, decay) if decay else torch._foreach_mul(gradients, 1.0)
        if group["adapt"]:
            # Equation 6: lambda = eta |w| / (|g| + beta |w|).
            weight_norms = whole_norms(weights)
            denominators = whole_norms(gradients) + decay * weight_norms
            torch._foreach_mul_(moves, trust_ratios(group["trust"] * weight_norms, denominators, weights[0].dtype))
        torch._foreach_mul_(moves, group["lr"])
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, moves)
        # w <- w - v
        torch._foreach_sub_(weights, velocities)
