"""All-to-all attention: ranks trade positions of all heads for all positions of some heads, attend, and trade back.

Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.1. Between the two trades attention is torch's own, over the
whole sequence, so any mask, scale or bias is served that torch serves; the price is that heads must divide by ranks.

Shapes: B batch, H heads, L local positions, S = cp x L the whole sequence, E width of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.channel import Channel
from shoal.core.errors import Refusal


def _trade(sent: Sequence[Sequence[Tensor]], shapes: Sequence[torch.Size], channel: Channel) -> list[list[Tensor]]:
    """Give ``sent[r]``, several tensors in one message, to rank r; from every rank come tensors of ``shapes``."""
    outgoing = [torch.cat([tensor.flatten() for tensor in tensors]) for tensors in sent]
    sizes = [shape.numel() for shape in shapes]
    incoming = [outgoing[0].new_empty(sum(sizes)) for _ in range(channel.size)]
    channel.all_to_all(outgoing, incoming)
    return [
        [part.view(shape) for part, shape in zip(torch.split(message, sizes), shapes, strict=True)]
        for message in incoming
    ]


def _heads_for_positions(tensors: Sequence[Tensor], channel: Channel) -> list[Tensor]:
    """(B, H, L, E) each -> (B, H / cp, S, E) each."""
    chunks = [tensor.chunk(channel.size, dim=1) for tensor in tensors]
    sent = [[parts[rank] for parts in chunks] for rank in range(channel.size)]
    received = _trade(sent, [part.shape for part in sent[0]], channel)
    return [torch.cat(parts, dim=2) for parts in zip(*received, strict=True)]


def _positions_for_heads(tensors: Sequence[Tensor], channel: Channel) -> list[Tensor]:
    """(B, H / cp, S, E) each -> (B, H, L, E) each."""
    chunks = [tensor.chunk(channel.size, dim=2) for tensor in tensors]
    sent = [[parts[rank] for parts in chunks] for rank in range(channel.size)]
    received = _trade(sent, [part.shape for part in sent[0]], channel)
    return [torch.cat(parts, dim=1) for parts in zip(*received, strict=True)]


class _ToHeads(torch.autograd.Function):
    """Queries, keys and values in one message; each trade is the other's transpose, so it is its backward pass."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All positions of some heads."""
        ctx.channel = channel
        return tuple(_heads_for_positions(tensors, channel))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Some positions of all heads."""
        return (None, *_positions_for_heads(grads, ctx.channel))


class _ToPositions(torch.autograd.Function):
    """The way back, for what attention gives."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, tensor: Tensor) -> Tensor:
        """Some positions of all heads."""
        ctx.channel = channel
        return _positions_for_heads([tensor], channel)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """All positions of some heads."""
        return None, _heads_for_positions([grad], ctx.channel)[0]


def num_copies(num_heads: int, num_kv_heads: int, degree: int) -> int:
    """How many times each key-value head is sent, the fewest that let every rank have the ones that its query heads share.

    Raises:
        Refusal: the query heads do not divide by the ranks.
    """
    if num_heads % degree:
        fitting = [number for number in range(2, num_heads + 1) if num_heads % number == 0]
        raise Refusal(
            f"cp_kind=alltoall deals {num_heads} heads out over cp={degree}, which does not divide them; "
            f"use cp_kind=ring, or cp of {', '.join(map(str, fitting)) or 1}"
        )
    num_groups = num_heads // num_kv_heads
    return next(
        copies
        for copies in range(1, num_groups + 1)
        if num_groups % copies == 0 and num_kv_heads * copies % degree == 0
    )


def alltoall_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    channel: Channel,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        query: (B, H, L, E), this rank's positions; rank r holds the r-th slice of the sequence.
        key: (B, K, L, E), this rank's; H is a multiple of K.
        value: (B, K, L, V), this rank's.
        channel: the ranks that share the sequence.
        mask: True where a key may be seen, or what is added to scores; 4-D, broadcast to (B, H, S, S).
        causal: a position sees only itself and earlier ones; may come with a mask.
        scale: of the scores; 1 over the root of E when None.

    Raises:
        Refusal: the heads do not divide by the ranks.
    """
    num_heads = query.shape[1]
    copies = num_copies(num_heads, key.shape[1], channel.size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    some_query, some_key, some_value = _ToHeads.apply(channel, query, key, value)  # type: ignore[no-untyped-call]
    if mask is not None and mask.shape[1] != 1:
        mask = mask.chunk(channel.size, dim=1)[channel.rank]
    if mask is not None and causal:
        mask, causal = _with_causal(mask, some_query.shape[-2]), False
    attended = F.scaled_dot_product_attention(
        some_query,
        some_key,
        some_value,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=some_key.shape[1] != some_query.shape[1],
    )
    output: Tensor = _ToPositions.apply(channel, attended)  # type: ignore[no-untyped-call]
    return output


def _with_causal(mask: Tensor, length: int) -> Tensor:
    """A mask that hides later keys too: torch takes one or the other."""
    visible = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))
