"""A module whose tensors have shapes and no memory, for as long as a context lasts.

Fake tensors and not the meta device: they say that they are on the CPU, so torch chooses the kernels, and keeps what these need
for their backward passes, as it does in a real run.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shoal.costs.constants import ConstantsMode

_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def faked(module: nn.Module) -> Iterator[FakeTensorMode]:
    """Inside, every parameter and buffer is a fake one of the same shape and type, and tied ones are tied; then all is put back.

    Attributes that the forward pass sets are put back too: a fake tensor that a module remembers would be of no use to it.
    torch logs a traceback of its own for each operation that fails on fake tensors; whoever traces says that in one sentence.
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
