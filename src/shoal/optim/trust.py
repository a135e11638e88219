"""The trust ratio that LARS and LAMB share: each tensor's own step length, from the norms of the whole tensor.

Both optimizers are written here because torch has neither. Their arithmetic uses only operations that round once (multiply, add,
divide, square root). Those have one right answer; how often a compound operation rounds is the compiler's choice, and it may
choose otherwise for the last few elements of a tensor, so that the result would depend on where a shard is cut.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.rows import whole_norms

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
