"""LAMB: Adam in which every tensor moves by a fraction of its own norm, for attention models at very large batches.

You et al. 2019, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv:1904.00962), algorithm 2 with
the identity as its scaling function phi.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from shoal.optim.trust import Norms, TrustOptimizer, scaled_sum, trust_ratios


class Lamb(TrustOptimizer):
    """LAMB over groups that say ``adapt``: False means AdamW's own step length, as is usual for biases and norms."""

    def __init__(
        self,
        groups: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        norms: Norms | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, norms)

    def create_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has not been stepped; the count stays on the CPU, where reading it waits for nothing."""
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def step_group(self, group: dict[str, Any], names: list[str], weights: list[Tensor]) -> None:
        """Algorithm 2 over one group."""
        states = [self.state[weight] for weight in weights]
        for state in states:
            state["step"] += 1
        gradients = [cast(Tensor, weight.grad) for weight in weights]
        moves = self._adam_directions(group, gradients, states) if weights else []
        if group["weight_decay"] and weights:
            # r + lambda x
            moves = scaled_sum(moves, weights, group["weight_decay"])
        norms = (self.norms(names, weights), self.norms(names, moves)) if group["adapt"] else None
        if not weights:
            return
        if norms is not None:
            # phi(|x|) / |r + lambda x|
            torch._foreach_mul_(moves, trust_ratios(*norms, weights[0].dtype))
        torch._foreach_mul_(moves, group["lr"])
        torch._foreach_sub_(weights, moves)

    def _adam_directions(
        self, group: dict[str, Any], gradients: list[Tensor], states: list[dict[str, Tensor]]
    ) -> list[Tensor]:
        """Algorithm 2: ``r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)``, with both moments brought up to date."""
        beta1, beta2 = group["betas"]
        counts = [state["step"].item() for state in states]
        firsts = [state["exp_avg"] for state in states]
        seconds = [state["exp_avg_sq"] for state in states]
        # m <- beta1 m + (1 - beta1) g
        torch._foreach_mul_(firsts, beta1)
        torch._foreach_add_(firsts, torch._foreach_mul(gradients, 1 - beta1))
        # v <- beta2 v + (1 - beta2) g^2
        squares = torch._foreach_mul(gradients, gradients)
        torch._foreach_mul_(squares, 1 - beta2)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_add_(seconds, squares)
        denominators = list(torch._foreach_sqrt(seconds))
        torch._foreach_div_(denominators, [math.sqrt(1 - beta2**count) for count in counts])
        torch._foreach_add_(denominators, group["eps"])
        directions = list(torch._foreach_div(firsts, [1 - beta1**count for count in counts]))
        torch._foreach_div_(directions, denominators)
        return directions
