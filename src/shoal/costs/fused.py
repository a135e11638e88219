"""Attention with dropout as accelerators run it: in one kernel.

On a CPU torch computes it in several, which write the scores and keep them; its kernels for accelerators drop inside. A module is
traced as on a CPU, so for another device the dropout of attention is left out: it is no work worth counting, and the kernel that
torch then takes keeps what those of accelerators keep.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_INSIDE = inspect.signature(F.multi_head_attention_forward)


class OneKernel(TorchFunctionMode):
    """While active, torch's attention functions do not drop."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            # query, key, value, attn_mask, dropout_p, is_causal
            return func(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **(kwargs | _without_dropout(kwargs)))
        if func is F.multi_head_attention_forward:
            bound = _INSIDE.bind(*args, **kwargs)
            bound.apply_defaults()
            # One that gives its weights away has to write them.
            if not bound.arguments["need_weights"]:
                bound.arguments["dropout_p"] = 0.0
                return func(*bound.args, **bound.kwargs)
        return func(*args, **kwargs)


def _without_dropout(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
