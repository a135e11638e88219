"""What one operation of torch computes, read off its arguments: matrix products by their sizes, everything else by its bytes.

torch's own ``FlopCounterMode`` counts matrix products too, but not those of attention and recurrent layers on a CPU, nothing of
what is not a product, and it tells only sums.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_UNTOUCHED = frozenset({aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided})
"""Operations that give out memory and do not look at it, though their schemas do not say so."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """``count`` products of (``rows``, ``inner``) by (``inner``, ``outer``)."""

    rows: int
    inner: int
    outer: int
    count: int = 1
    experts: int = 1
    """Matrices that the rows are dealt out to, each row to one of them."""

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.count * self.rows * self.inner * self.outer

    @property
    def sizes(self) -> tuple[int, ...]:
        """What may depend on the batch."""
        return self.count, self.rows, self.inner, self.outer


@dataclass(frozen=True, kw_only=True)
class Attention:
    """``rows`` positions that look at ``outer`` positions, with ``heads`` heads in each of ``samples`` samples."""

    samples: int
    heads: int
    kv_heads: int
    rows: int
    outer: int
    width: int
    """Features of a query and of a key."""
    value_width: int
    is_causal: bool

    @property
    def operations(self) -> int:
        """Of queries with keys, and of scores with values; what a causal mask throws away is counted."""
        return 2 * self.samples * self.heads * self.rows * self.outer * (self.width + self.value_width)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What may depend on the batch."""
        return self.samples, self.heads, self.rows, self.outer


def products_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> tuple[Product | Attention, ...]:
    """The matrix products of an operation; none where it is something else."""
    packet = func.overloadpacket
    read = _PRODUCTS.get(packet)
    if read is not None:
        return read(named_arguments(func, args, kwargs), output)
    count = flop_registry.get(packet)
    if count is None:
        return ()
    # What no rule here reads has no sizes, only a sum.
    return (Product(rows=count(*args, **kwargs, out_val=output) // 2, inner=1, outer=1),)


def is_view(func: Any) -> bool:
    """True for what only looks at memory in another way, or asks for some."""
    returns = [value.alias_info for value in func._schema.returns]
    return func.overloadpacket in _UNTOUCHED or any(alias is not None and not alias.is_write for alias in returns)


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by the names of its schema."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _read_product(named: dict[str, Any], output: Any) -> tuple[Product, ...]:
    one = named["self"] if "mat1" not in named else named["mat1"]
    return (Product(rows=one.shape[0], inner=one.shape[1], outer=named["mat2"].shape[1]),)


def _read_batch(named: dict[str, Any], output: Any) -> tuple[Product, ...]:
    one, two = (named["batch1"], named["batch2"]) if "batch1" in named else (named["self"], named["mat2"])
    return (Product(count=one.shape[0], rows=one.shape[1], inner=one.shape[2], outer=two.shape[2]),)


def _read_grouped(named: dict[str, Any], output: Any) -> tuple[Product, ...]:
    """Rows in the order of groups, each group with a matrix of its own: how torch computes experts."""
    one, two = named["self"], named["mat2"]
    if one.ndim == 2 and two.ndim == 3:
        return (Product(rows=one.shape[0], inner=one.shape[1], outer=two.shape[2], experts=two.shape[0]),)
    return (Product(rows=math.prod(one.shape[:-1]), inner=one.shape[-1], outer=two.shape[-1]),)


def _read_convolution(named: dict[str, Any], output: Any) -> tuple[Product, ...]:
    """A product for each group; its rows are the places of the smaller image, or of the larger where it shrinks."""
    image, weight, groups = named["input"], named["weight"], named["groups"]
    if named["transposed"]:
        places = image.shape[0] * math.prod(image.shape[2:])
        inner, outer = weight.shape[0] // groups, weight.shape[1] * math.prod(weight.shape[2:])
    else:
        places = output.shape[0] * math.prod(output.shape[2:])
        inner, outer = weight.shape[1] * math.prod(weight.shape[2:]), weight.shape[0] // groups
    return (Product(count=groups, rows=places, inner=inner, outer=outer),)


def _read_attention(named: dict[str, Any], output: Any) -> tuple[Attention, ...]:
    query, key, value = named["query"], named["key"], named["value"]
    attention = Attention(
        samples=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        rows=query.shape[2],
        outer=key.shape[2],
        width=query.shape[3],
        value_width=value.shape[3],
        is_causal=bool(named.get("is_causal", False)),
    )
    return (attention,)


def _read_recurrent(named: dict[str, Any], output: Any) -> tuple[Product, ...]:
    """Of each position with both matrices."""
    places = math.prod(named["input"].shape[:-1])
    return tuple(
        Product(rows=places, inner=named[name].shape[1], outer=named[name].shape[0]) for name in ("weight0", "weight1")
    )


_PRODUCTS: dict[Any, Callable[[dict[str, Any], Any], tuple[Product | Attention, ...]]] = {
    aten.mm: _read_product,
    aten.addmm: _read_product,
    aten.bmm: _read_batch,
    aten.baddbmm: _read_batch,
    aten._grouped_mm: _read_grouped,
    aten.convolution: _read_convolution,
    aten.mkldnn_rnn_layer: _read_recurrent,
    aten._scaled_dot_product_flash_attention_for_cpu: _read_attention,
    aten._scaled_dot_product_flash_attention: _read_attention,
    aten._scaled_dot_product_efficient_attention: _read_attention,
    aten._scaled_dot_product_cudnn_attention: _read_attention,
    aten._scaled_dot_product_fused_attention_overrideable: _read_attention,
}


_INSIDE = inspect.signature(F.multi_head_attention_forward)


class OneKernel(TorchFunctionMode):
    """While active, torch's attention functions do not drop, as accelerators run them: in one kernel.

    On a CPU torch computes attention with dropout in several kernels, which write the scores and keep them; its kernels for
    accelerators drop inside. A module is traced as on a CPU, so for another device the dropout of attention is left out: it is no
    work worth counting, and the kernel that torch then takes keeps what those of accelerators keep.
    """

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
