"""Ring attention: exact attention over a sequence that is spread over ranks.

Every rank keeps its queries; blocks of keys and values go around the ring, and what each block gives is merged with what the
others gave through the logsumexp (Liu, Zaharia & Abbeel 2023, arXiv 2310.01889; the merge is Milakov & Gimelshein 2018, arXiv
1805.02867). With the zigzag cut of ``positions.py`` a causal step costs every rank the same, half of a full one::

    own block        queries of both chunks x own keys, causal         j = the rank that the block comes from
    j < own rank     queries of both chunks x keys of j's first chunk
    j > own rank     queries of the second chunk x keys of both chunks

torch 2.13 has a ring in ``torch.distributed.tensor.experimental``; it does not run on the CPU and takes no mask.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.channel import Channel
from shoal.parallel.context.chunks import attend, attend_backward, finite
from shoal.parallel.context.positions import Positions

# Shapes: B batch, H query heads, K key-value heads, L local positions, E head width, V value width.


@dataclass(frozen=True, kw_only=True)
class Part:
    """What of one block is computed: halves of the local queries and of the block's keys, as (start, stop) in halves."""

    rows: tuple[int, int] = (0, 2)
    columns: tuple[int, int] = (0, 2)
    is_diagonal: bool = False
    """A query sees keys up to its own place only."""


def visible_part(rank: int, source: int, *, causal: bool) -> Part:
    """What the queries of ``rank`` see of the keys of ``source``."""
    if not causal:
        return Part()
    if source == rank:
        return Part(is_diagonal=True)
    return Part(columns=(0, 1)) if source < rank else Part(rows=(1, 2))


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What one attention was asked for, without its tensors."""

    channel: Channel
    positions: Positions
    causal: bool
    scale: float | None
    num_groups: int
    """Query heads per key-value head."""

    def part_of(self, step: int) -> tuple[int, Part]:
        source = (self.channel.rank - step) % self.channel.size
        return source, visible_part(self.channel.rank, source, causal=self.causal)

    def spread(self, x_BKLE: Tensor, columns: slice) -> Tensor:
        """Keys or values for every query head."""
        kept = x_BKLE[:, :, columns]
        return kept if self.num_groups == 1 else kept.repeat_interleave(self.num_groups, dim=1)

    def collect(self, grad_BHLE: Tensor) -> Tensor:
        """The gradient of a shared key-value head: the sum over the query heads that share it."""
        if self.num_groups == 1:
            return grad_BHLE
        num_samples, num_heads, *rest = grad_BHLE.shape
        return grad_BHLE.reshape(num_samples, num_heads // self.num_groups, self.num_groups, *rest).sum(2)

    def mask_of(
        self, mask: Tensor | None, source: int, part: Part, rows: slice, columns: slice, like: Tensor
    ) -> tuple[Tensor | None, bool]:
        """The mask of one part, added to the scores, and whether the operator is to be causal itself."""
        if mask is None:
            return None, part.is_diagonal
        if mask.shape[-1] != 1:
            mask = self.positions.of_rank(source).cut(mask, -1)[..., columns]
        if mask.shape[-2] != 1:
            mask = mask[..., rows, :]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -math.inf)
        mask = mask.to(like.dtype)
        num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
        if part.is_diagonal:
            hidden = torch.ones(num_rows, num_columns, dtype=torch.bool, device=like.device).triu(1)
            mask = mask.expand(*mask.shape[:-2], num_rows, num_columns).masked_fill(hidden, -math.inf)
        return mask.expand(*mask.shape[:-2], num_rows, num_columns), False


class _Ring(torch.autograd.Function):
    """One attention. Forward sends keys and values around; backward does so again, and their gradients travel with them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: _Call) -> Tensor:
        """Merge over blocks, in the order own, previous rank, the one before, ..."""
        length, size = query.shape[-2], call.channel.size
        merged, logsumexp = _nothing(query, value)
        block = _pack(key, value)
        for step in range(size):
            source, part = call.part_of(step)
            rows, columns = _half(part.rows, length), _half(part.columns, length)
            keys, values = _unpack(block, key.shape, value.shape)
            part_mask, causal = call.mask_of(mask, source, part, rows, columns, query)
            given = attend(
                query[:, :, rows],
                call.spread(keys, columns),
                call.spread(values, columns),
                mask=part_mask,
                causal=causal,
                scale=call.scale,
            )
            _merge(merged, logsumexp, rows, *given)
            if step < size - 1:
                block = _pass_on(call.channel, block)
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, logsumexp)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Every rank adds its share to the gradient of the block that is with it; a last hop brings each gradient home."""
        query, key, value, mask, output, logsumexp = ctx.saved_tensors
        call: _Call = ctx.call
        length, size, wide = query.shape[-2], call.channel.size, logsumexp.dtype
        logsumexp, grad = finite(logsumexp), grad.contiguous()
        grad_query = torch.zeros_like(query, dtype=wide)
        block = _pack(key, value)
        grad_block = torch.zeros_like(block, dtype=wide)
        for step in range(size):
            source, part = call.part_of(step)
            rows, columns = _half(part.rows, length), _half(part.columns, length)
            keys, values = _unpack(block, key.shape, value.shape)
            part_mask, causal = call.mask_of(mask, source, part, rows, columns, query)
            grads = attend_backward(
                grad[:, :, rows],
                query[:, :, rows],
                call.spread(keys, columns),
                call.spread(values, columns),
                output[:, :, rows],
                logsumexp[:, :, rows],
                mask=part_mask,
                causal=causal,
                scale=call.scale,
            )
            grad_query[:, :, rows] += grads[0]
            for whole, share in zip(_unpack(grad_block, key.shape, value.shape), grads[1:], strict=True):
                whole[:, :, columns] += call.collect(share.to(wide))
            if step < size - 1:
                block = _pass_on(call.channel, block)
            grad_block = _pass_on(call.channel, grad_block)
        grad_key, grad_value = _unpack(grad_block, key.shape, value.shape)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _nothing(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What queries have gathered before the first block, in the type that merging is done in."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    merged = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
    return merged, query.new_full(query.shape[:-1], -math.inf, dtype=wide)


def _merge(merged: Tensor, logsumexp: Tensor, rows: slice, given: Tensor, given_logsumexp: Tensor) -> None:
    """Weigh what was gathered before and what a block gives by the sums of their exponentials, in place."""
    before, now = logsumexp[:, :, rows], given_logsumexp
    largest = finite(torch.maximum(before, now))
    weight_before, weight_now = (before - largest).exp(), (now - largest).exp()
    total = weight_before + weight_now
    # Where a query has seen nothing yet both weights are 0, and so is what it has gathered.
    share = 1.0 / total.masked_fill(total == 0.0, 1.0)
    kept = merged[:, :, rows]
    kept.mul_((weight_before * share)[..., None]).addcmul_(given.to(kept.dtype), (weight_now * share)[..., None])
    before.copy_(largest + total.log())


def _half(halves: tuple[int, int], length: int) -> slice:
    return slice(halves[0] * length // 2, halves[1] * length // 2)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one flat message."""
    return torch.cat((key.flatten(), value.flatten()))


def _unpack(block: Tensor, key_shape: torch.Size, value_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Views of a message."""
    num_key = key_shape.numel()
    return block[:num_key].view(key_shape), block[num_key:].view(value_shape)


def _pass_on(channel: Channel, block: Tensor) -> Tensor:
    received = torch.empty_like(block)
    channel.ring_shift(block, received)
    return received


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    channel: Channel,
    positions: Positions,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        query: (B, H, L, E), this rank's positions.
        key: (B, K, L, E), this rank's; H is a multiple of K.
        value: (B, K, L, V), this rank's.
        channel: the ranks that share the sequence.
        positions: which positions those are; zigzag, as ``kind="ring"`` cuts.
        mask: True where a key may be seen, or what is added to scores; 4-D, broadcast to (B, H, L, whole sequence). Needs no
            gradient.
        causal: a position sees only itself and earlier ones; may come with a mask.
        scale: of the scores; 1 over the root of E when None.
    """
    call = _Call(
        channel=channel,
        positions=positions,
        causal=causal,
        scale=scale,
        num_groups=query.shape[1] // key.shape[1],
    )
    # Inputs come in the type that is to be computed in: autocast would change the written-out form's products again.
    with torch.autocast(query.device.type if query.device.type != "meta" else "cpu", enabled=False):
        output: Tensor = _Ring.apply(query, key, value, mask, call)  # type: ignore[no-untyped-call]
    return output
