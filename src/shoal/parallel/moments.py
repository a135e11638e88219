"""Batch statistics over several replicas, and the normalisation that uses them: the arithmetic of synchronised batch norm.

torch's ``SyncBatchNorm`` refuses CPU tensors. This one runs wherever the group does, takes replicas with unequal counts and with
none, and adds in the order of ranks, so that its bits do not depend on how a collective happens to reduce.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from shoal.comm.channel import is_silent

# Shapes: C channels; a moments vector is (1 + 2 C): the count, then C means, then C sums of squared distances from the mean (M2).


def local_moments(x: Tensor) -> Tensor:
    """The float64 moments of one microbatch, (N, C, ...) -> (1 + 2 C); zeros when it has no sample."""
    num_channels = x.shape[1]
    count = x.numel() // max(1, num_channels)
    moments = x.new_zeros(1 + 2 * num_channels, dtype=torch.float64)
    if count > 0:
        variance, mean = torch.var_mean(x.to(accumulation_dtype(x.dtype)), dim=_reduced_dims(x), correction=0)
        moments[0] = count
        moments[1 : 1 + num_channels] = mean
        moments[1 + num_channels :] = variance.double() * count
    return moments


def combine_moments(parts: Sequence[Tensor]) -> Tensor:
    """The moments of all parts together, added in their order; no part needs a sample.

    Chan, Golub & LeVeque 1983, "Algorithms for Computing the Sample Variance", equation 2.1 for several parts at once.
    """
    num_channels = (parts[0].numel() - 1) // 2
    counts = [part[0] for part in parts]
    means = [part[1 : 1 + num_channels] for part in parts]
    total = add_in_order(counts)
    mean = add_in_order([count * mean for count, mean in zip(counts, means, strict=True)]) / total.clamp(min=1)
    spread = add_in_order(
        [
            part[1 + num_channels :] + count * (part_mean - mean).square()
            for part, count, part_mean in zip(parts, counts, means, strict=True)
        ]
    )
    return torch.cat((total.reshape(1), mean, spread))


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum from first to last: a reduction over a dim may pair them otherwise."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def gather_in_order(packet: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every replica's packet in the order of ranks; waits no longer than the group's own timeout."""
    if is_silent():
        return [packet] * dist.get_world_size(group)
    parts = [torch.empty_like(packet) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, packet, group=group)
    return parts


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics of a tensor of ``dtype`` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reduced_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _over_channels(vector: Tensor, ndim: int) -> Tensor:
    return vector.reshape(1, -1, *[1] * (ndim - 2))


class _SyncNormalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` with the statistics of all replicas' microbatches together.

    Ioffe & Szegedy 2015, "Batch Normalization" (arXiv:1502.03167), algorithm 1. Gives the output and the moments, (1 + 2 C).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """Gather moments, combine them in rank order, normalise."""
        moments = combine_moments(gather_in_order(local_moments(x), group))
        dtype, num_channels = accumulation_dtype(x.dtype), x.shape[1]
        count = moments[0].clamp(min=1)
        mean = moments[1 : 1 + num_channels].to(dtype)
        inverse = torch.rsqrt(moments[1 + num_channels :] / count + eps).to(dtype)
        scale = inverse if weight is None else inverse * weight.to(dtype)
        y = (x.to(dtype) - _over_channels(mean, x.ndim)) * _over_channels(scale, x.ndim)
        if bias is not None:
            y = y + _over_channels(bias.to(dtype), x.ndim)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(moments)
        return y.to(x.dtype), moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """The chain rule of the paper's section 3, in which a replica's input also moves the other replicas' statistics."""
        x, weight, mean, inverse, count = ctx.saved_tensors
        dtype, ndim, dims = mean.dtype, x.ndim, _reduced_dims(x)
        grad = grad_y.to(dtype)
        normalised = (x.to(dtype) - _over_channels(mean, ndim)) * _over_channels(inverse, ndim)
        sum_grad = grad.sum(dims)
        sum_grad_normalised = (grad * normalised).sum(dims)
        grad_x = None
        # Parameters get this replica's own share, because data parallelism adds them afterwards; the input needs the sums of all.
        if ctx.needs_input_grad[0]:
            packet = torch.cat((sum_grad, sum_grad_normalised)).double()
            mean_grad, mean_grad_normalised = (
                (add_in_order(gather_in_order(packet, ctx.group)) / count).to(dtype).chunk(2)
            )
            scale = inverse if weight is None else inverse * weight.to(dtype)
            centred = grad - _over_channels(mean_grad, ndim) - normalised * _over_channels(mean_grad_normalised, ndim)
            grad_x = (centred * _over_channels(scale, ndim)).to(x.dtype)
        grad_weight = sum_grad_normalised.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_grad.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


# Not `torch.compiler.disable`, which imports the compiler here and now: two seconds that every rank would pay at its start.
@_disable_dynamo
def sync_normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Normalise by the statistics of all replicas; outside compiled graphs, because it waits for other processes."""
    normalised, moments = _SyncNormalise.apply(x, weight, bias, eps, group)  # type: ignore[no-untyped-call]
    return normalised, moments
