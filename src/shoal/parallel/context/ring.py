"""Ring attention: exact attention over a sequence that is spread over ranks.

Every rank keeps its queries; blocks of keys and values go around the ring, and what each block gives is merged with what the
others gave through the logsumexp (Liu, Zaharia & Abbeel 2023, arXiv 2310.01889; the merge is Milakov & Gimelshein 2018, arXiv
1805.02867). With the zigzag cut of ``positions.py`` a causal step costs every rank the same, half of a full one::

    own block        queries of both chunks x own keys, causal         j = the rank that the block comes from
    j < own rank     queries of both chunks x keys of j's first chunk
    j > own rank     queries of the second chunk x keys of both chunks

torch 2.13 has a ring in ``torch.distributed.tensor.experimental``; it does not run on the CPU and takes no mask.

Attention of some queries to some keys, with the logsumexp that lets partial results be merged: the step of a ring.

``F.scaled_dot_product_attention`` throws the logsumexp away, so the operators under it are called here: torch's private flash
operators for the CPU and for CUDA (half types without a mask), and the arithmetic written out for whatever these do not take.

Shapes: B batch, H heads (keys and values have as many), Q queries, K keys, E head width, V value width.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.channel import Channel
from shoal.parallel.context.positions import Positions


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """What queries gather from these keys alone, and the logsumexp of their scores; -inf for a query that sees no key.

    Args:
        query: (B, H, Q, E).
        key: (B, H, K, E).
        value: (B, H, K, V).
        mask: added to the scores; 4-D, broadcast to (B, H, Q, K), of the queries' type.
        causal: query i sees keys 0 to i; not together with ``mask``, and Q equals K.
        scale: of the scores; 1 over the root of E when None.
    """
    if not _has_operator(query, value, mask):
        return _attend_written_out(query, key, value, mask=mask, causal=causal, scale=scale)
    if query.is_cuda:
        # The last argument asks for a debugging mask; of nine results the first two are ours.
        output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return output, logsumexp[..., : query.shape[-2]]
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    # torch's kernel reports 0 for a query without a key, which a merge would take for a real score.
    return output, logsumexp if mask is None else logsumexp.masked_fill(_is_blind(mask, query, key), -math.inf)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values through these keys alone.

    Args:
        grad: of the merged output, (B, H, Q, V).
        query: see ``attend``, as are ``key``, ``value``, ``mask``, ``causal`` and ``scale``.
        output: merged over all keys: softmax's backward needs the row sums of grad * output.
        logsumexp: over all keys; finite (0 for a query that sees nothing).
    """
    if not _has_operator(query, value, mask):
        return _backward_written_out(grad, query, key, value, output, logsumexp, mask=mask, causal=causal, scale=scale)
    if query.is_cuda:
        # Without dropout the state of the generator is not read; the operator still wants tensors in its place.
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        sizes = (None, None, query.shape[-2], key.shape[-2])
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, output, logsumexp, *sizes, 0.0, causal, unused, unused, scale=scale
        )
        return grads
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, logsumexp, 0.0, causal, attn_mask=mask, scale=scale
    )
    return grads


def _has_operator(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if query.shape[-1] != value.shape[-1]:
        return False
    if query.is_cuda:
        return mask is None and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0
    return query.device.type in ("cpu", "meta")


def _is_blind(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (mask == -math.inf).all(-1).expand(query.shape[:-1])


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * factor
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores  # (B, H, Q, K)


def _attend_written_out(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask, causal, scale)
    logsumexp = torch.logsumexp(scores, -1)
    weights = (scores - finite(logsumexp)[..., None]).exp()
    return (weights @ value.to(weights.dtype)).to(query.dtype), logsumexp


def _backward_written_out(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2 (arXiv 2307.08691), algorithm 2, with one tile."""
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = (_scores(query, key, mask, causal, scale) - logsumexp[..., None]).exp()
    wide = grad.to(weights.dtype)
    grad_value = weights.transpose(-2, -1) @ wide
    row_sums = (wide * output.to(weights.dtype)).sum(-1, keepdim=True)
    grad_scores = weights * (wide @ value.to(weights.dtype).transpose(-2, -1) - row_sums) * factor
    grad_query = grad_scores @ key.to(weights.dtype)
    grad_key = grad_scores.transpose(-2, -1) @ query.to(weights.dtype)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def finite(logsumexp: Tensor) -> Tensor:
    """0 where a query sees nothing, so that its weights come out as exp(-inf - 0) = 0 and not as a NaN."""
    return logsumexp.masked_fill(logsumexp == -math.inf, 0.0)


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
