"""The norm of the whole gradient, and clipping by it.

torch's ``clip_grad_norm_`` sums each tensor in its own type, and how it splits that sum depends on how a tensor is sharded. A
clipped step scales every gradient by that norm, so its bits must not depend on the plan.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.optim.rows import whole_norms


def global_norm(named_grads: Iterable[tuple[str, Tensor]], *, exact: bool) -> float:
    """The 2-norm over all gradients together. Reading it is the step's one wait for the device.

    Args:
        named_grads: gradients with the names of their parameters.
        exact: sum squares in float64, by row and in the order of names, so that sharding changes no bit; clipping needs it.
            Otherwise one kernel per tensor in its own type, five times cheaper: enough to see that all is finite and to show a
            number (a float32 tensor longer than about 1e19 counts as infinite).
    """
    grads = [grad for _, grad in sorted(named_grads, key=lambda pair: pair[0])]
    if not grads:
        return 0.0
    norms = whole_norms(grads) if exact else torch.stack(torch._foreach_norm(grads)).double()
    return float(norms.square().sum().sqrt())


def clip_(grads: Iterable[Tensor], norm: float, limit: float | None, loss_scale: float = 1.0) -> None:
    """Shorten gradients in place to ``limit`` and take the loss scale out of them, in one pass; in none when nothing changes.

    Args:
        grads: every gradient of the model, still multiplied by ``loss_scale``.
        norm: the norm of the whole gradient without the loss scale, ``global_norm(...) / loss_scale``; finite.
        limit: the longest gradient allowed; None for no limit.
        loss_scale: what the loss was multiplied by.
    """
    shorten = limit / norm if limit is not None and norm > limit else 1.0
    factor = shorten / loss_scale
    tensors = list(grads)
    if factor != 1.0 and tensors:
        torch._foreach_mul_(tensors, factor)
