"""What each unit of a chain costs, counted and not timed: the same numbers in every process, at every start.

What an asynchronous pipeline computes depends on where it is cut, and every rank has to cut at the same places, so a clock is
no basis for a cut that nobody wrote down. What an operation computes is read by ``costs/operations.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.core.errors import RequestError
from shoal.costs.operations import is_view, num_bytes, products_of
from shoal.pipeline.split import UnitCost
from shoal.pipeline.units import Unit
from shoal.pipeline.watch import FORWARDS_PER_STEP, Watch

OPERATIONS_PER_SECOND = 50_000_000_000
"""Of a processor core of these years; only ratios matter to a cut."""
OPERATIONS_PER_BYTE = 8
"""In the time in which an operation that is no matrix product reads or writes a byte, a product does so many."""


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
        products = products_of(func, args, kwargs, output)
        if products:
            self.operations += sum(product.operations for product in products)
        elif not is_view(func):
            # All of an embedding's table, too: its gradient is as large as the table, however few rows are read.
            self.operations += OPERATIONS_PER_BYTE * num_bytes((args, kwargs, output))
        return output
