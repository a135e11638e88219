"""What a dropout does with a mask once it is drawn: the arithmetic that modules and functions share, attention included.

``attend`` is ``F.scaled_dot_product_attention`` with dropout, written out: torch's own draws its mask inside the kernel, from the
generator of the process, so neither another plan nor a recompute could draw it again.
"""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.errors import Refusal

# torch's alpha dropout sets a dropped unit to the value a SELU saturates at (arXiv 1706.02515, section 3).
_SELU_LIMIT = -1.7580993408473766
_HALF = (torch.bfloat16, torch.float16)


class Draw(Protocol):
    """Draws the mask of one call."""

    def __call__(self, like: Tensor, *, p: float, scale: float, channels: bool) -> Tensor:
        """0 where ``like`` is dropped, ``scale`` elsewhere."""


def multiply(x: Tensor, draw: Draw, *, p: float, channels: bool = False, inplace: bool = False) -> Tensor:
    """Zero with probability p and scale the rest by 1 / (1 - p)."""
    if p == 1.0:
        result = x * 0.0
    elif x.dtype in _HALF:
        # The scale is no half-precision number: in the mask it would be rounded, and every activation with it.
        result = x * draw(x, p=p, scale=1.0, channels=channels) * (1.0 / (1.0 - p))
    else:
        result = x * draw(x, p=p, scale=1.0 / (1.0 - p), channels=channels)
    return x.copy_(result) if inplace else result


def saturate(x: Tensor, draw: Draw, *, p: float, channels: bool = False, inplace: bool = False) -> Tensor:
    """Drop to the saturation of SELU with probability p, and keep mean and variance."""
    kept = 1.0 - p
    slope = 1.0 / math.sqrt(kept * (1.0 + p * _SELU_LIMIT**2)) if kept else 0.0
    mask = draw(x, p=p, scale=1.0, channels=channels) if kept else torch.zeros_like(x)
    result = slope * (x * mask + _SELU_LIMIT * (1.0 - mask) - _SELU_LIMIT * p)
    return x.copy_(result) if inplace else result


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    draw: Draw,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout on its weights, by the formula in torch's documentation of ``scaled_dot_product_attention``.

    Half-precision inputs are computed in float32 and the result is rounded once, as torch's kernels do.
    """
    if is_causal and attn_mask is not None:
        raise Refusal("attention has is_causal=True and an attn_mask; give one of the two")
    query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    dtype = query.dtype
    wide = torch.float32 if dtype in _HALF else dtype
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = (query * factor) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask.to(wide)
        # The safe one gives zeros to a row that may see nothing, as torch's attention does; softmax gives NaN.
        weights: Any = torch.ops.aten._safe_softmax.default(scores, -1)
        return (multiply(weights, draw, p=dropout_p) @ value).to(dtype)


def _autocast(x: Tensor) -> Tensor:
    """What autocast does to an argument of attention."""
    kind = x.device.type
    if x.dtype == torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
