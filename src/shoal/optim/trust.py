"""The trust ratio that LARS and LAMB share: each tensor's own step length, from the norms of the whole tensor.

Both optimizers are written here because torch has neither. Their arithmetic uses only operations that round once (multiply, add,
divide, square root). Those have one right answer; how often a compound operation rounds is the compiler's choice, and it may
choose otherwise for the last few elements of a tensor, so that the result would depend on where a shard is cut.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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
