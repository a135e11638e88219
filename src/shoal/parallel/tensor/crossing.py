"""Where activations cross between the ranks of an axis, and what their gradients do on the way back.

Each function is a pair of collectives, one forward and one backward (Megatron-LM, arXiv 1909.08053, section 3, and arXiv
2205.05198, section 4.2.2)::

                       forward          backward
    copy_in            nothing          all_reduce       a whole tensor enters layers that are split
    sum_out            all_reduce       nothing          partial sums leave them
    gather_sequence    all_gather       reduce_scatter   a cut sequence enters layers that are split
    scatter_sequence   reduce_scatter   all_gather       partial sums leave them, the sequence cut
    enter_sequence     slice            all_gather       a whole sequence enters a region with a cut sequence
    leave_sequence     all_gather       slice            and leaves it
    gather_features    all_gather       slice            split features become whole

torch's DTensor has these as redistributions, decided again at every operation; here they are three small autograd functions over
a ``Channel``, so that they are counted, add in the order of ranks, and cost one call each. All of them work without a gradient,
under autocast, in a recomputed forward pass and on meta tensors, and none can be differentiated twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.channel import Channel

Move = Callable[[Tensor, Channel, int], Tensor]
"""Moves a tensor along one of its dims, without a gradient."""


def copy_in(x: Tensor, channel: Channel) -> Tensor:
    """The tensor itself; its gradient is summed over ranks.

    Only for what goes straight into matrix products: the gradient that comes back is summed in place, so it must be nobody
    else's, and the result shares its memory with ``x``.
    """
    return x if channel.size == 1 else _apply(_CopyIn, x, channel)


def sum_out(x: Tensor, channel: Channel) -> Tensor:
    """The sum over ranks, in the memory of ``x``; every rank's gradient is the gradient of the sum.

    Only for what comes straight out of an operation that does not keep its result for the backward pass.
    """
    return x if channel.size == 1 else _apply(_SumOut, x, channel)


def gather_sequence(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """Every rank's slice of ``dim``, one after another; gradients are summed over ranks, and each keeps its slice."""
    return x if channel.size == 1 else _apply(_Along, x, channel, dim, gather_along, reduce_scatter_along)


def scatter_sequence(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """This rank's slice of ``dim`` of the sum over ranks; gradients are gathered. ``x`` is not usable afterwards."""
    if channel.size == 1:
        return x
    return _apply(_Along, x.clone() if _is_watched() else x, channel, dim, reduce_scatter_along, gather_along)


def enter_sequence(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """This rank's slice of ``dim`` of a tensor that is the same on every rank; gradients are gathered."""
    return x if channel.size == 1 else _apply(_Along, x, channel, dim, slice_along, gather_along)


def leave_sequence(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """Every rank's slice of ``dim``, one after another; each keeps its slice of a gradient that is the same on every rank."""
    return x if channel.size == 1 else _apply(_Along, x, channel, dim, gather_along, slice_along)


gather_features = leave_sequence
"""The same crossing along a dim of features; every rank must go on to compute the same with the result."""


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.channel.all_reduce_(grads[0].contiguous()), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        if x.is_contiguous() and not _is_watched():
            ctx.mark_dirty(x)
            return channel.all_reduce_(x)
        return channel.all_reduce_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Along(torch.autograd.Function):
    """One movement along a dim forward, another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, dim: int, there: Move, back: Move) -> Tensor:
        ctx.channel, ctx.dim, ctx.back = channel, dim, back
        return there(x, channel, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grads[0], ctx.channel, ctx.dim), None, None, None, None


def gather_along(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """Every rank's equal slice of ``dim``, one after another. No gradient."""
    dim %= x.ndim
    stacked = x.new_empty((channel.size, *x.shape))
    channel.all_gather(x.contiguous().view(-1), stacked.view(-1), [x.numel()] * channel.size)
    shape = (*x.shape[:dim], channel.size * x.shape[dim], *x.shape[dim + 1 :])
    # One copy, unless the dim is the outermost: ranks arrive one after another.
    return stacked.movedim(0, dim).reshape(shape)


def reduce_scatter_along(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """This rank's equal slice of ``dim`` of the sum over ranks; ``x`` may be overwritten. No gradient."""
    dim %= x.ndim
    own = x.shape[dim] // channel.size
    stacked = x.reshape(*x.shape[:dim], channel.size, own, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()
    local = x.new_empty(stacked.shape[1:])
    channel.reduce_scatter(stacked.view(-1), local.view(-1), [local.numel()] * channel.size)
    return local


def slice_along(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """This rank's equal slice of ``dim``, in memory of its own."""
    own = x.shape[dim] // channel.size
    # A copy even where the slice is contiguous: a block may add to its input in place.
    return x.narrow(dim, channel.rank * own, own).clone(memory_format=torch.contiguous_format)


def _is_watched() -> bool:
    """True while a dispatch mode sees every operation.

    Selective recompute keeps results of matrix products that way; one that was then summed in place would be summed again.
    """
    return torch._C._len_torch_dispatch_stack() > 0
