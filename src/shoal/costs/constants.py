"""Fake tensors for what depends on data or weights; real ones for what depends on neither.

A model may look at positions that it has counted itself, or at a mask that it has made of them, and take another way for what it
sees: Hugging Face's models leave the causal mask to the attention kernel where positions just go up, and then do not repeat the
key-value heads; ``nn.Transformer`` compares its mask with the causal one. On fake tensors a model cannot look: it fails, or takes
the other way, which keeps more for the backward pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.costs.recurrent import lstm_workspace_bytes

aten = torch.ops.aten
_MOST_ELEMENTS = 2**20
"""Larger constants stay fake: a causal mask of a long sequence alone has gigabytes."""


class ConstantsMode(FakeTensorMode):
    """A ``FakeTensorMode`` in which what is made of constants alone has its values, unless it is large."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._is_inside = False
        """An operation is being run for its shapes."""
        self._written: dict[int, torch.UntypedStorage] = {}
        """Storages of real tensors into which something without values was written. Held, so that none is given out again."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute what is constant, and the shapes alone of the rest."""
        named = dict(kwargs or {})
        if self._is_inside:
            return super().__torch_dispatch__(func, types, args, named)  # type: ignore[no-untyped-call]
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        if not self._is_constant(func, given):
            self._note_writes(func, args, named)
            if self._written:
                args, named = tree_map_only(Tensor, _without_history, (tuple(args), named))
            output = self._fake(func, types, args, named)
            return _with_workspace(args, output) if func is aten.mkldnn_rnn_layer.default else output
        if not func._schema.is_mutable:
            try:
                shapes = self._fake(func, types, args, named)
            except (DataDependentOutputException, DynamicOutputShapeException):
                shapes = None  # It asks for a value, which is there.
            if not all(_is_small(leaf) for leaf in tree_leaves(shapes) if isinstance(leaf, Tensor)):
                return shapes
        return func(*args, **named)

    def _fake(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # torch makes some operations of others, and asks for the memory of their results first, as if it were a constant.
        self._is_inside = True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._is_inside = False

    def _is_constant(self, func: Any, given: Sequence[Tensor]) -> bool:
        return torch.Tag.nondeterministic_seeded not in func.tags and all(
            not isinstance(tensor, FakeTensor) and _is_small(tensor) and _storage(tensor) not in self._written
            for tensor in given
        )

    def _note_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember the real tensors that change in an operation of which the values are not known."""
        if not func._schema.is_mutable:
            return
        names = [argument.name for argument in func._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(named.get(argument.name)):
                    if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                        self._written[_storage(leaf)] = leaf.untyped_storage()


def _is_small(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.numel() <= _MOST_ELEMENTS
    )


def _without_history(tensor: Tensor) -> Tensor:
    """The tensor; of a real one that autograd follows since it was written into, its values alone, as torch wants them here."""
    return tensor if isinstance(tensor, FakeTensor) or not tensor.requires_grad else tensor.detach()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _with_workspace(args: Sequence[Any], output: Any) -> Any:
    """torch gives an empty workspace where it runs an LSTM layer for its shapes alone."""
    inputs, hidden, trains = args[0], args[10], args[15]
    if not trains:
        return output
    positions, samples, num_inputs = inputs.shape
    num_bytes = lstm_workspace_bytes(
        positions=positions, samples=samples, inputs=num_inputs, hidden=hidden, itemsize=inputs.element_size()
    )
    return *output[:3], output[3].new_empty(num_bytes)
