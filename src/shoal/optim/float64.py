"""Operations that torch computes in every type but float64.

Nobody trains in float64; proofs compute in it, because only there a rounding can be told from a bug. So what a model calls in
float32 has to be there in float64 too. Registered with torch as a kernel and not put in a function's place: a gradient formula of
torch's own calls the same operation again. Other types go to torch's kernel, with the same bits.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_GROUPED = "_grouped_mm"


@cache
def provide_float64() -> Any:
    """Register them, once per process; what is returned keeps them registered."""
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
