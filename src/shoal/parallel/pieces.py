"""Cutting a whole tensor into what a rank holds of it, and putting it back."""

import torch
from torch import Tensor

from shoal.core.placement import Placement, Shape


def take_local(whole: Tensor, placement: Placement) -> Tensor:
    """A new local tensor cut from a whole one; what no patch covers is zero."""
    local = torch.zeros(placement.local_shape, dtype=whole.dtype, device=whole.device)
    for patch in placement.patches:
        local[box(patch.local_start, patch.shape)] = whole[box(patch.whole_start, patch.shape)]
    return local


def put_local(local: Tensor, whole: Tensor, placement: Placement) -> None:
    """Write a local tensor's patches into the whole tensor."""
    for patch in placement.patches:
        whole[box(patch.whole_start, patch.shape)] = local[box(patch.local_start, patch.shape)]


def box(start: Shape, shape: Shape) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(first, first + extent) for first, extent in zip(start, shape, strict=True))
