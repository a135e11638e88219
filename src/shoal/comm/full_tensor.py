"""The local part of a whole tensor that a rank holds, as its placement says, and the whole tensor out of all ranks' parts."""

import torch
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
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


def is_spokesman(mesh: Mesh, *, is_split: bool, is_sharded: bool) -> bool:
    """True on exactly one of the ranks that hold the same part of a tensor.

    Args:
        mesh: where this rank stands.
        is_split: tensor-parallel ranks hold different parts of it.
        is_sharded: the ranks along dp hold different parts of it (ZeRO).
    """
    speaks_for_dp = is_sharded or mesh.coordinate(Axis.DATA) == 0
    speaks_for_tp = is_split or mesh.coordinate(Axis.TENSOR) == 0
    return speaks_for_dp and speaks_for_tp and mesh.coordinate(Axis.CONTEXT) == 0


def gather_whole(
    local: Tensor | None, placement: Placement, *, dtype: torch.dtype, device: torch.device, mesh: Mesh
) -> Tensor:
    """The whole tensor, on every rank. All ranks call it together; those that hold nothing, or are not to speak, give None.

    Bytes are added, not numbers: zeros of the ranks that do not speak change none of them, whereas -0.0 + 0.0 would be 0.0.
    A rank that does not speak must give the type and the device too, or it would wait in another collective.
    """
    whole = torch.zeros(placement.whole_shape, dtype=dtype, device=device)
    if local is not None:
        put_local(local.detach(), whole, placement)
    if whole.numel():
        mesh.everyone.all_reduce_(whole.reshape(-1).view(torch.uint8))
    return whole
