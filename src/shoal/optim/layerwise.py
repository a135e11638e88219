"""LARS and LAMB, optimizers for very large batches: every tensor moves by a fraction of its own norm (its trust ratio).

Both optimizers are written here because torch has neither. Their arithmetic uses only operations that round once (multiply, add,
divide, square root). Those have one right answer; how often a compound operation rounds is the compiler's choice, and it may
choose otherwise for the last few elements of a tensor, so that the result would depend on where a shard is cut.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.norms import whole_norms

Norms = Callable[[Sequence[str], Sequence[Tensor]], Tensor]
"""Names and tensors to the float64 norms of the whole tensors; collective where ranks hold parts of them."""


class TrustOptimizer(Optimizer):
    """What LARS and LAMB share: groups that say ``adapt``, state made by ``create_state``, and norms of whole tensors.

    ``adapt`` False leaves the trust ratio out, as is usual for biases and norms.
    """

    def __init__(self, groups: Any, defaults: dict[str, Any], norms: Norms | None) -> None:
        super().__init__(groups, {**defaults, "adapt": True})
        self.norms: Norms = norms or (lambda _, tensors: whole_norms(tensors))
        self._is_collective = norms is not None

    def create_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has not been stepped."""
        raise NotImplementedError

    def step_group(self, group: dict[str, Any], names: list[str], weights: list[Tensor]) -> None:
        """One update of a group's tensors, all of which have gradients and state."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            members = cast(list[Tensor], group["params"])
            names = group.get("param_names") or [str(place) for place in range(len(members))]
            present = [(name, weight) for name, weight in zip(names, members, strict=True) if weight.grad is not None]
            for _, weight in present:
                if not self.state[weight]:
                    self.state[weight] = self.create_state(weight)
            # A rank with nothing in a group still takes part where norms are gathered from all ranks.
            if present or (self._is_collective and group["adapt"]):
                self.step_group(group, [name for name, _ in present], [weight for _, weight in present])
        return loss


def trust_ratios(numerators: Tensor, denominators: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """One ratio per tensor; 1 where a norm is zero or the quotient is not finite, so that a zero tensor can leave zero."""
    ratios = numerators / denominators
    usable = (numerators > 0) & (denominators > 0) & torch.isfinite(ratios)
    return list(torch.where(usable, ratios, torch.ones_like(ratios)).to(dtype).unbind())


def scaled_sum(first: Sequence[Tensor], second: Sequence[Tensor], scale: float) -> list[Tensor]:
    """``first + scale * second`` for each pair, as new tensors."""
    total = torch._foreach_mul(list(second), scale)
    torch._foreach_add_(total, list(first))
    return list(total)


class Lars(TrustOptimizer):
    """LARS: momentum SGD with a trust ratio per tensor; groups with ``adapt`` False have plain momentum.

    You, Gitman & Ginsburg 2017, "Large Batch Training of Convolutional Networks" (arXiv:1708.03888), equation 6 and algorithm 1.
    """

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


class Lamb(TrustOptimizer):
    """LAMB: Adam with a trust ratio per tensor; groups with ``adapt`` False have AdamW's own step length.

    You et al. 2019, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv:1904.00962), algorithm 2
    with the identity as its scaling function phi.
    """

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
        self.hears_ratios: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None = None
        """Is told of weights and their trust ratios at every step; None where nobody asks."""

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
            ratios = trust_ratios(*norms, weights[0].dtype)
            torch._foreach_mul_(moves, ratios)
            if self.hears_ratios is not None:
                self.hears_ratios(weights, ratios)
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
