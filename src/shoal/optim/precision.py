"""Precision: in which type the weights are kept, in which type layers compute, and the loss scale that float16 needs.

Weights, gradients and optimizer state stay in float32 (or float64), because a step of 1e-4 on a weight of 1 vanishes in a 16-bit
type; bfloat16 and float16 are what autocast computes in. torch's ``GradScaler`` is not used: it keeps its state on a device and
decides by itself which steps to skip, while here all ranks must decide alike, from one number, and the state is a value in a
checkpoint.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shoal.optim.config import PrecisionName

GROWTH = 2.0
BACKOFF = 0.5
GROWTH_EVERY = 2000
LOWEST_SCALE = 1.0
# Without a ceiling a run that never overflows doubles the scale until it is infinite, and an infinite scale never comes back.
HIGHEST_SCALE = 2.0**24


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """What the loss is multiplied by so that small gradients survive float16; 1 means that nothing is scaled."""

    scale: float = 2.0**16
    good_steps: int = 0
    """Steps in a row without an overflow since the scale last changed."""

    @property
    def can_back_off(self) -> bool:
        """True while an overflow may still be the scale's fault."""
        return self.scale > LOWEST_SCALE

    def after_step(self, finite: bool) -> "LossScale":
        """The scale after a step whose gradient was finite, or was not (and which was therefore skipped)."""
        if not finite:
            return LossScale(scale=max(self.scale * BACKOFF, LOWEST_SCALE))
        if self.good_steps + 1 < GROWTH_EVERY:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(scale=min(self.scale * GROWTH, HIGHEST_SCALE))


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The types of one run."""

    name: PrecisionName
    weight_dtype: torch.dtype
    """Type of weights, gradients, optimizer state and floating-point inputs."""
    compute_dtype: torch.dtype | None
    """Type that autocast computes in; None when layers compute in the type of their weights."""

    @classmethod
    def named(cls, name: PrecisionName) -> "Precision":
        """The precision with this name; what a model needs to compute in it is there afterwards."""
        if name == "float64":
            provide_float64()
        return _PRECISIONS[name]

    @property
    def scales_loss(self) -> bool:
        """True for float16, whose smallest normal number is 6e-5."""
        return self.compute_dtype == torch.float16

    @property
    def first_loss_scale(self) -> LossScale:
        """The loss scale of a fresh run: 1, which changes nothing, except for float16."""
        return LossScale() if self.scales_loss else LossScale(scale=1.0)

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """The context to run a forward pass and its loss in."""
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.compute_dtype)

    def cast_input(self, tensor: Tensor) -> Tensor:
        """An input or target in the type of the weights; whole numbers and masks stay what they are."""
        return tensor.to(self.weight_dtype) if tensor.is_floating_point() else tensor


_PRECISIONS: dict[PrecisionName, Precision] = {
    "float32": Precision(name="float32", weight_dtype=torch.float32, compute_dtype=None),
    "bfloat16": Precision(name="bfloat16", weight_dtype=torch.float32, compute_dtype=torch.bfloat16),
    "float16": Precision(name="float16", weight_dtype=torch.float32, compute_dtype=torch.float16),
    "float64": Precision(name="float64", weight_dtype=torch.float64, compute_dtype=None),
}


_GROUPED = "_grouped_mm"


@cache
def provide_float64() -> Any:
    """Register what torch computes in every type but float64, once per process; the returned value keeps it registered.

    Nobody trains in float64; proofs compute in it, because only there a rounding can be told from a bug. So what a model calls
    in float32 has to be there in float64 too. It is a kernel and not a function put in another's place, because a gradient
    formula of torch's own calls the same operation again. Other types go to torch's kernel, with the same bits.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for device in ("CPU", "CUDA"):
        kernel = torch.library.get_kernel(f"aten::{_GROUPED}", device)

        def multiply(
            keys: Any,
            one: Tensor,
            two: Tensor,
            offs: Tensor | None = None,
            bias: Tensor | None = None,
            out_dtype: torch.dtype | None = None,
            *,
            kernel: Any = kernel,
        ) -> Tensor:
            if one.dtype is torch.float64:
                return _grouped(one, two, offs, bias)
            product: Tensor = kernel.call_boxed(keys, one, two, offs, bias, out_dtype)
            return product

        library.impl(_GROUPED, multiply, device, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _grouped(one: Tensor, two: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    """Products of groups of rows with a matrix for each, as experts do them; ``offs`` has the end of every group.

    Of two operands the one without a dim for groups is cut: rows of the first, columns of the second, or the dim between.
    """
    if offs is None:
        product = torch.bmm(one, two)
    else:
        groups = list(enumerate(pairwise([0, *offs.tolist()])))
        if one.ndim == 2 and two.ndim == 2:
            product = torch.stack([one[:, first:end] @ two[first:end] for _, (first, end) in groups])
        elif one.ndim == 2:
            product = one.new_zeros(one.shape[0], two.shape[2])
            for group, (first, end) in groups:
                product[first:end] = one[first:end] @ two[group]
        else:
            product = one.new_zeros(one.shape[1], two.shape[1])
            for group, (first, end) in groups:
                product[:, first:end] = one[group] @ two[:, first:end]
    return product if bias is None else product + bias
