"""The gradient of one replica's microbatches, or of one worker's, added in its plan's order: what every reference is made of.

One partial sum per direction of a bidirectional pipeline and per stage that uses a tied weight; these are added in this order.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from shoal.verify.case import Tree
from shoal.verify.parts import Ids, Parts, batch_loss, gradient_of
from shoal.verify.uses import split_uses


def group_gradients(
    parts: Parts, step: int, group: Sequence[Ids], tree: Tree, *, total: float, scale: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient, by the weights that the model has now.

    Args:
        parts: model and data.
        step: that the samples are of.
        group: microbatches in order; empty ones add nothing.
        tree: the order.
        total: weight of everything that the mean is over.
        scale: what the loss is multiplied by; it is still in the gradient.
    """
    partial = torch.zeros((), dtype=parts.precision.weight_dtype, device=parts.device)
    terms: dict[str, list[Tensor]] = {name: [] for name, _ in parts.named}
    for way in _ways(group, tree.directions):
        parts.optimizer.zero_grad(set_to_none=True)
        with split_uses(parts.model, tree.uses) as leaves:
            for cut in way:
                value = batch_loss(parts, step, cut, total)
                (value if scale == 1.0 else value * scale).backward()  # type: ignore[no-untyped-call]
                partial = partial + value.detach()
        for name, parameter in parts.named:
            terms[name] += [gradient_of(leaf) for leaf in leaves.get(name, [parameter])]
    return partial, {name: reduce(add, found) for name, found in terms.items()}


def _ways(group: Sequence[Ids], directions: int) -> list[list[Ids]]:
    """A replica's microbatches by the direction in which they go through the pipeline; empty ones go nowhere."""
    half = len(group) if directions == 1 else (len(group) + 1) // 2
    return [[cut for cut in way if len(cut)] for way in (group[:half], group[half:])[:directions]]
