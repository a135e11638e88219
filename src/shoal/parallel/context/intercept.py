"""Puts attention over all ranks in the place of attention over what this rank has, inside a block that knows nothing of it.

While a block runs, a ``TorchFunctionMode`` sees every torch function that it calls. ``F.scaled_dot_product_attention`` and
``F.multi_head_attention_forward`` go to the ring or to the all-to-all; what would silently be wrong on a part of a sequence
(attention written out by hand, positions counted from 0, a table cut to the first positions) is refused by name. torch's own
context parallelism replaces the attention of DTensors instead, which asks the user to make the model's tensors such.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.comm.channel import Channel
from shoal.core.errors import Refusal
from shoal.parallel.context.alltoall import alltoall_attention
from shoal.parallel.context.positions import Positions
from shoal.parallel.context.ring import ring_attention
from shoal.parallel.context.traffic_forecast import AttentionShape, ObservedShapes

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax})

# Shapes: B batch, H query heads, K key-value heads, L local positions, S the whole sequence, E head width.


@dataclass(kw_only=True)
class Run:
    """One run of one block on this rank's part of a sequence."""

    path: str
    """Of the block, for messages."""
    channel: Channel
    positions: Positions
    whole: int
    """Length of the whole sequence."""
    local: int
    """Positions of it that attention sees here."""
    rows: Tensor
    """The numbers of these positions."""
    arguments: Sequence[Tensor] = ()
    """What the block was given, to recognise masks in."""
    tables: Mapping[int, str] = field(default_factory=dict)
    """The block's own tensors: name by ``id``."""
    seen: ObservedShapes = field(default_factory=ObservedShapes)
    """Where attentions are entered while traffic is counted."""
    num_attentions: int = 0
    """How many attentions it has computed."""

    def refuse(self, what: str, fix: str) -> Refusal:
        """The error for something that cannot be right on a part of a sequence."""
        return Refusal(
            f"cp={self.channel.size}: block {self.path!r} {what}, but this rank holds {self.local} of {self.whole} positions; "
            f"{fix}"
        )


class Interception(TorchFunctionMode):
    """The mode; made anew for each run of a block, so that a recomputed run is served like the first."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Serve attention, refuse what cannot be right, leave the rest alone."""
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product(self.run, *args, **given)
        if func is F.multi_head_attention_forward:
            return _multi_head(self.run, _MULTI_HEAD.bind(*args, **given).arguments)
        if func is torch.arange:
            _check_arange(self.run, args, given)
        elif func is Tensor.__getitem__:
            _check_table(self.run, args[0], args[1])
        elif func in _SOFTMAX:
            _check_softmax(self.run, args, given)
        return func(*args, **given)


def _check_arange(run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    names = ("end",) if len(args) == 1 and "end" not in kwargs else ("start", "end", "step")
    bounds = {"start": 0, "step": 1, **dict(zip(names, args, strict=False)), **kwargs}
    if (bounds["start"], bounds["end"], bounds["step"]) == (0, run.local, 1):
        raise run.refuse(
            "counts positions from 0 by torch.arange",
            "give it positions, or the table made of them, as an argument, which is cut along the sequence",
        )


def _check_table(run: Run, table: Tensor, index: Any) -> None:
    name = run.tables.get(id(table))
    if name is None:
        return
    for entry in index if isinstance(index, tuple) else (index,):
        if isinstance(entry, slice) and entry.stop == run.local:
            raise run.refuse(
                f"takes the first {run.local} of its table {name!r}",
                "give the table to the block as an argument, which is cut along the sequence",
            )


def _check_softmax(run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    scores = args[0] if args else kwargs["input"]
    if scores.ndim >= 3 and scores.shape[-2:] == (run.local, run.local):
        raise run.refuse(
            "writes its attention out (softmax of a square of scores)",
            "use F.scaled_dot_product_attention (Hugging Face: attn_implementation='sdpa'), or cp=1",
        )


def _scaled_dot_product(
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of local queries."""
    run.num_attentions += 1
    if dropout_p > 0.0:
        raise run.refuse(
            f"drops attention weights with probability {dropout_p:g}, whose mask cp does not draw",
            "set the model's attention dropout to 0, or cp=1",
        )
    if query.ndim == 3:
        # One head that has no dim of its own.
        mask = attn_mask[:, None] if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
        narrow = [tensor.unsqueeze(1) for tensor in (query, key, value)]
        return _attend(run, *narrow, mask=mask, causal=is_causal, scale=scale).squeeze(1)
    if query.ndim != 4:
        raise run.refuse(f"attends with {query.ndim} dims", "use (batch, heads, positions, width)")
    return _attend(run, query, key, value, mask=attn_mask, causal=is_causal, scale=scale)


def _attend(
    run: Run, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    query, key, value = _autocast(query, key, value)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if num_queries != run.local:
        raise run.refuse(
            f"attends from {num_queries} to {num_keys} positions", "cp serves attention of the whole stream; use cp=1"
        )
    if num_keys != run.local:
        return _attend_whole(run, query, key, value, mask=mask, causal=causal, scale=scale)
    if query.numel() == 0 or value.numel() == 0:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=key.shape[1] != query.shape[1])
    _enter_shape(run, query, key, value)
    if mask is not None:
        mask = _whole_columns(run, mask)
    if run.positions.kind == "alltoall":
        if mask is not None and mask.shape[-2] not in (1, run.whole):
            raise run.refuse(
                f"has a mask of {mask.shape[-2]} rows, of which cp_kind=alltoall needs all", "use cp_kind=ring"
            )
        return alltoall_attention(query, key, value, channel=run.channel, mask=mask, causal=causal, scale=scale)
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise run.refuse("learns its attention mask, which cp_kind=ring does not", "use cp_kind=alltoall")
    if mask is not None:
        mask = _own_rows(run, mask)
    return ring_attention(
        query, key, value, channel=run.channel, positions=run.positions, mask=mask, causal=causal, scale=scale
    )


def _enter_shape(run: Run, query: Tensor, key: Tensor, value: Tensor) -> None:
    # A recomputed run is inside a backward pass, which is a task of the autograd engine.
    if not run.channel.is_counting or torch._C._current_graph_task_id() != -1:
        return
    tensors = (query, key, value)
    shape = AttentionShape(
        batch=query.shape[0],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        local_length=run.local,
        width=query.shape[-1],
        value_width=value.shape[-1],
        itemsize=query.element_size(),
        # Under recompute gradients are on, as they are in a plain training forward.
        trains=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
    )
    run.seen.attentions.append(shape)


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast would have done for torch's own attention, which is on its list of half-precision operations."""
    kind = query.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or query.dtype == torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _attend_whole(
    run: Run, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Attention to another sequence, which every rank has whole: nothing crosses ranks.

    Keys and values get, on each rank, the gradient of that rank's queries, and the sum over cp makes them whole.
    """
    num_keys = key.shape[-2]
    if mask is not None:
        mask = _own_rows(run, mask)
    if causal:
        # torch aligns rows and columns at their first, whatever their numbers.
        visible = run.rows[:, None] >= torch.arange(num_keys, device=query.device)
        if mask is None:
            mask = visible
        else:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )


def _own_rows(run: Run, mask: Tensor) -> Tensor:
    """A mask with a row per local query, or one row for all."""
    if mask.shape[-2] in (1, run.local):
        return mask
    if mask.shape[-2] != run.whole:
        raise run.refuse(f"has an attention mask of shape {tuple(mask.shape)}", f"use {run.whole} rows")
    return run.positions.cut(mask, -2)


def _whole_columns(run: Run, mask: Tensor) -> Tensor:
    """A mask with a column per position of the whole sequence, or one column for all."""
    if mask.shape[-1] == run.whole or (mask.shape[-1] == 1 and run.local != 1):
        return mask
    if mask.shape[-1] == run.local:
        # Some models cut a mask to the number of their keys: the first columns, which are not this rank's.
        for argument in run.arguments:
            if _is_front_of(mask, argument):
                return argument
    raise run.refuse(
        f"has an attention mask of shape {tuple(mask.shape)}",
        f"use {run.whole} columns, a mask that is an argument of the block",
    )


def _is_front_of(part: Tensor, whole: Tensor) -> bool:
    return (
        part.ndim == whole.ndim
        and part.device == whole.device
        and part.device.type != "meta"
        and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        and part.storage_offset() == whole.storage_offset()
        and part.stride() == whole.stride()
        and part.shape[:-1] == whole.shape[:-1]
    )


def _multi_head(run: Run, given: Mapping[str, Any]) -> tuple[Tensor, None]:
    """``F.multi_head_attention_forward``, written out: with a mode active torch's own cannot be entered.

    Weights are never returned: they are a square that no rank has. Who uses them gets None, and fails where it is used.
    """
    query, key, value = given["query"], given["key"], given["value"]  # (positions, B, hidden)
    if query.ndim != 3:
        raise run.refuse("attends without a batch dim", "give nn.MultiheadAttention a batch")
    odd = [name for name in ("bias_k", "bias_v", "static_k", "static_v") if given.get(name) is not None]
    if odd or given.get("add_zero_attn"):
        raise run.refuse(f"uses {odd or ['add_zero_attn']} of nn.MultiheadAttention", "leave them out, or use cp=1")
    num_heads, num_samples = given["num_heads"], query.shape[1]
    if given.get("use_separate_proj_weight"):
        weights = (given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"])
    else:
        weights = given["in_proj_weight"].chunk(3)
    bias = given.get("in_proj_bias")
    biases = (None, None, None) if bias is None else bias.chunk(3)
    heads = [
        F.linear(source, weight, shift).view(len(source), num_samples, num_heads, -1).permute(1, 2, 0, 3)
        for source, weight, shift in zip((query, key, value), weights, biases, strict=True)
    ]
    causal = bool(given.get("is_causal", False))
    mask = _multi_head_mask(given, num_heads=num_heads, num_samples=num_samples, causal=causal, like=query)
    dropout = given["dropout_p"] if given.get("training", True) else 0.0
    mixed = _scaled_dot_product(run, heads[0], heads[1], heads[2], mask, dropout, causal)  # (B, H, L, E)
    output = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    return output, None


def _multi_head_mask(
    given: Mapping[str, Any], *, num_heads: int, num_samples: int, causal: bool, like: Tensor
) -> Tensor | None:
    """Both masks of torch's function as one that is added to scores. There True means hidden, and causal is a mask in words."""
    total: Tensor | None = None
    attention_mask = None if causal else given.get("attn_mask")
    if attention_mask is not None:
        total = _added(attention_mask, like)
        total = total.view(num_samples, num_heads, *total.shape[1:]) if total.ndim == 3 else total[None, None]
    padding = given.get("key_padding_mask")
    if padding is not None:
        padding = _added(padding, like)[:, None, None, :]
        total = padding if total is None else total + padding
    return total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, float("-inf"))
