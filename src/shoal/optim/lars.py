"""LARS: momentum SGD in which every tensor moves by a fraction of its own norm, for batches of many thousands.

You, Gitman & Ginsburg 2017, "Large Batch Training of Convolutional Networks" (arXiv:1708.03888), equation 6 and algorithm 1.
"""

from typing import Any, cast

import torch
from torch import Tensor

from shoal.optim.trust import Norms, TrustOptimizer, scaled_sum, trust_ratios


class Lars(TrustOptimizer):
    """LARS over groups that say ``adapt``: False means plain momentum, as is usual for biases and norms."""

    def __init__(
        self, groups: Any, *, lr: float, momentum: float, weight_decay: float, trust: float, norms: Norms | None = None
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}, norms)

    def create_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has not been stepped."""
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def step_group(self, group: dict[str, Any], names: list[str], weights: list[Tensor]) -> None:
        """Algorithm 1 over one group."""
        gradients = [cast(Tensor, weight.grad) for weight in weights]
        velocities = [self.state[weight]["momentum_buffer"] for weight in weights]
        decay = group["weight_decay"]
        norms = (self.norms(names, weights), self.norms(names, gradients)) if group["adapt"] else None
        if not weights:
            return
        # Algorithm 1: v <- m v + gamma lambda (g + beta w).
        moves = scaled_sum(gradients, weights, decay) if decay else torch._foreach_mul(gradients, 1.0)
        if norms is not None:
            # Equation 6: lambda = eta |w| / (|g| + beta |w|).
            weight_norms, gradient_norms = norms
            denominators = gradient_norms + decay * weight_norms
            torch._foreach_mul_(moves, trust_ratios(group["trust"] * weight_norms, denominators, weights[0].dtype))
        torch._foreach_mul_(moves, group["lr"])
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, moves)
        # w <- w - v
        torch._foreach_sub_(weights, velocities)
