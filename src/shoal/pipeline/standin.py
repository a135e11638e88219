"""What stands in for a unit of another stage: outputs of the right shape and type, without a value and without memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shoal.comm.channel import silent
from shoal.costs.fake import every_type
from shoal.randomness.dropout import Calls, DropoutKey
from shoal.telemetry.draws import keeping_draws


class StandIns:
    """Outputs by the shapes of inputs; a unit is asked once per shape, without computing."""

    def __init__(self, dropout: DropoutKey | None) -> None:
        self.dropout = dropout
        self.has_memory = False
        """Each has memory after all: the module writes to what its units put out, as ``x += positions`` does."""
        self.value = math.nan
        """What they are filled with. Not a number, so that what is computed from it is none either; others for a probe."""
        self._known: dict[tuple[Any, ...], Any] = {}

    def of(
        self, call: int, unit: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mode: bool
    ) -> Any:
        """What a unit would put out for these arguments: numbers that are not there, NaN, one expanded to the shape.

        Args:
            call: which unit it is.
            unit: its forward.
            args: by place.
            kwargs: by name.
            mode: whether it trains.
        """
        flat, form = tree_flatten((tuple(args), dict(kwargs)))
        key = (call, mode, form, *(_sign(value) for value in flat))
        if key not in self._known:
            self._known[key] = self._ask(unit, flat, form)
        leaves, output_form, calls = self._known[key]
        if self.dropout is not None:
            # A dropout that this unit shares with a later one goes on counting where it would be.
            self.dropout.skip(calls)
        return tree_unflatten([self._empty(leaf) if isinstance(leaf, _Shape) else leaf for leaf in leaves], output_form)

    def _empty(self, shape: "_Shape") -> Tensor:
        value = self.value if shape.dtype.is_floating_point else int(self.value > 0)
        tensor = torch.tensor(value, dtype=shape.dtype, device=shape.device).expand(shape.size)
        return tensor.clone(memory_format=torch.contiguous_format) if self.has_memory else tensor

    def _ask(self, unit: Callable[..., Any], flat: list[Any], form: Any) -> tuple[list[Any], Any, Calls]:
        flat = [value.detach() if isinstance(value, Tensor) else value for value in flat]
        apart = nullcontext(Calls()) if self.dropout is None else self.dropout.apart()
        with (
            apart as calls,
            keeping_draws(),
            silent(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            torch.no_grad(),
            every_type(),
        ):
            args, kwargs = tree_unflatten(
                [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in flat], form
            )
            output = unit(*args, **kwargs)
        return *tree_flatten(tree_map_only(Tensor, _Shape, output)), calls


class _Shape:
    """Shape, type and device of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device


def _sign(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    return value if isinstance(value, int | float | str | bool | None) else id(value)
