"""What each unit of a chain costs, counted and not timed: the same numbers in every process, at every start.

What an asynchronous pipeline computes depends on where it is cut, and every rank has to cut at the same places, so a clock is
no basis for a cut that nobody wrote down. torch's own ``FlopCounterMode`` counts matrix products too, but not those of attention
and recurrent layers on a CPU, and nothing of what is not a product.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shoal.core.errors import RequestError
from shoal.pipeline.split import UnitCost
from shoal.pipeline.units import Unit
from shoal.pipeline.watch import FORWARDS_PER_STEP, Watch

OPERATIONS_PER_SECOND = 50_000_000_000
"""Of a processor core of these years; only ratios matter to a cut."""
OPERATIONS_PER_BYTE = 8
"""In the time in which an operation that is no matrix product reads or writes a byte, a product does so many."""

aten = torch.ops.aten
_UNTOUCHED = frozenset({aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided})
"""Operations that give out memory and do not look at it, though their schemas do not say so."""


def estimate_work(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> tuple[UnitCost, ...]:
    """Count the work of the units in one forward pass on an example, of which nothing stays.

    Raises:
        RequestError: the pass in training does not call the units that were found, or torch cannot show what it runs.
    """
    counter = _Counter()
    watch = Watch(model, units, lambda tensors: counter.operations)
    try:
        with watch.watching(), counter:
            operations = watch.run_saving(example)
    except RuntimeError as error:
        # What torch compiles for itself cannot be watched, flex_attention for one. The pass alone was seen to run.
        raise RequestError(
            f"the work of the module cannot be counted: {str(error).splitlines()[0]}; name the places in pipeline.stages, or set "
            'pipeline.balance = "measured"'
        ) from error
    return watch.costs([FORWARDS_PER_STEP * count / OPERATIONS_PER_SECOND for count in operations])


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of everything that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        packet = func.overloadpacket
        count = _MORE_PRODUCTS.get(packet) or flop_registry.get(packet)
        if count is not None:
            self.operations += count(*args, **kwargs, out_val=output)
        elif not _is_view(func):
            # All of an embedding's table, too: its gradient is as large as the table, however few rows are read.
            self.operations += OPERATIONS_PER_BYTE * _num_bytes((args, kwargs, output))
        return output


def _is_view(func: Any) -> bool:
    """True for what only looks at memory in another way, or asks for some."""
    returns = [value.alias_info for value in func._schema.returns]
    return func.overloadpacket in _UNTOUCHED or any(alias is not None and not alias.is_write for alias in returns)


def _num_bytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _count_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Of queries with keys, and of scores with values."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _count_recurrent(inputs: Tensor, of_input: Tensor, of_hidden: Tensor, *_: Any, **__: Any) -> int:
    """Of each position with both matrices."""
    return 2 * math.prod(inputs.shape[:-1]) * (of_input.numel() + of_hidden.numel())


_MORE_PRODUCTS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _count_attention,
    aten.mkldnn_rnn_layer: _count_recurrent,
}
