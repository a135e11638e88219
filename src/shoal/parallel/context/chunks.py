"""Attention of some queries to some keys, with the logsumexp that lets partial results be merged: the step of a ring.

``F.scaled_dot_product_attention`` throws the logsumexp away, so the operators under it are called here: torch's private flash
operators for the CPU and for CUDA (half types without a mask), and the arithmetic written out for whatever these do not take.

Shapes: B batch, H heads (keys and values have as many), Q queries, K keys, E head width, V value width.
"""

import math

import torch
from torch import Tensor


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
