"""A module on fake tensors, which have shapes and no memory, for as long as a context lasts.

Fake tensors and not the meta device: they say that they are on the CPU, so torch chooses the kernels, and keeps what these need
for their backward passes, as it does in a real run. What depends on neither data nor weights has its values: a model may look at
positions that it has counted itself, or at a mask that it has made of them, and take another way for what it sees. Hugging Face's
models leave the causal mask to the attention kernel where positions just go up, and then do not repeat the key-value heads;
``nn.Transformer`` compares its mask with the causal one.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_PAGE = 4096
_CACHE_LINE = 64
_FLOAT32 = 4


def lstm_workspace_bytes(*, positions: int, samples: int, inputs: int, hidden: int, itemsize: int) -> int:
    """Bytes that oneDNN's LSTM layer keeps for its backward pass, in one direction: its workspace, which torch does not size
    on tensors without memory.

    On the CPU torch runs an ``nn.LSTM`` of float32 or bfloat16 as one such layer for each layer and direction; a GRU, a plain RNN
    and an LSTM of float64 are made of ordinary operations. The workspace holds these matrices, each on pages of its own::

        rows               columns                what it is
        T B                4 H, padded            gates
        T B                H, padded              outputs
        2 (T + 1) B        max(I, H), padded      states
        2 (T + 1) B        H                      cells
        2 (T + 1) B        max(I, H), padded      gradients of states, twice: of the layer and of the position before; float32
        2 (T + 1) B        H                      gradients of cells; float32

    T positions, B samples, I inputs, H hidden. The form was read off the sizes that oneDNN gives out, to the byte. Another
    torch may have another oneDNN: ``tests/unit/costs/test_saved.py`` would tell.
    """
    rows = positions * samples
    # One more than there are positions, for the state that comes from outside; of the layer and of its input.
    states = 2 * (positions + 1) * samples
    widest = max(inputs, hidden)
    sizes = [
        rows * _padded_columns(4 * hidden, itemsize) * itemsize,
        rows * _padded_columns(hidden, itemsize) * itemsize,
        states * _padded_columns(widest, itemsize) * itemsize,
        states * hidden * itemsize,
        *[states * _padded_columns(widest, _FLOAT32) * _FLOAT32] * 2,
        states * hidden * _FLOAT32,
    ]
    return sum(-(-size // _PAGE) * _PAGE for size in sizes)


def _padded_columns(columns: int, itemsize: int) -> int:
    """Whole cache lines, and one more where rows would otherwise meet in the same sets of the cache."""
    line = _CACHE_LINE // itemsize
    columns = -(-columns // line) * line
    return columns + line if columns % 256 == 0 else columns


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


_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def faked(module: nn.Module) -> Iterator[FakeTensorMode]:
    """Inside, every parameter and buffer is a fake one of the same shape and type, and tied ones are tied; then all is put back.

    Attributes that the forward pass sets are put back too: a fake tensor that a module remembers would be of no use to it.
    torch logs a traceback of its own for each operation that fails on fake tensors; the caller says that in one sentence.
    """
    kept = [(part, dict(part.__dict__), [dict(slots) for slots in _slots(part)]) for part in module.modules()]
    mode = ConstantsMode()
    fakes: dict[int, Tensor] = {}
    was_silent, _TORCH_LOG.disabled = _TORCH_LOG.disabled, True
    try:
        for part, _, _ in kept:
            for slots in _slots(part)[:2]:
                for name, tensor in slots.items():
                    if tensor is not None:
                        slots[name] = fakes.setdefault(id(tensor), _fake_slot(tensor, mode))
        yield mode
    finally:
        _TORCH_LOG.disabled = was_silent
        for part, attributes, before in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            for slots, entries in zip(_slots(part), before, strict=True):
                slots.clear()
                slots.update(entries)


def _slots(part: nn.Module) -> Sequence[dict[str, Any]]:
    return part._parameters, part._buffers, part._modules


def without_memory(values: Any, mode: FakeTensorMode) -> Any:
    """The same tree, each tensor that lies on the meta device as a fake one: a module may hold tensors that are no buffers."""

    def change(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) or tensor.device.type != "meta" else fake_like(tensor, mode)

    return tree_map_only(Tensor, change, values)


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor of this shape and type."""
    # Without the mode's own dispatch, which takes many times as long, and a large model has thousands of parameters.
    return FakeTensor(mode, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), torch.device("cpu"))


def _fake_slot(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    fake = fake_like(tensor, mode)
    if isinstance(tensor, nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)
        fake._is_param = True
    return fake


def run_faked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on tensors without memory; where torch knows the shapes in bfloat16 alone, by way of that."""
    if func.overloadpacket is not torch.ops.aten._grouped_mm or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    one, two, *rest = args
    return func(one.bfloat16(), two.bfloat16(), *rest, **kwargs).to(one.dtype)


class _EveryType(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run_faked(func, args, kwargs or {})


@contextmanager
def every_type() -> Iterator[None]:
    """Inside, and inside a ``FakeTensorMode``, operations have shapes in every type in which they can be computed."""
    with _EveryType():  # type: ignore[no-untyped-call]
        yield
