"""Counts what a forward pass keeps for its backward pass, as autograd tells it: each storage once, no weights and no inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn


class SavedActivations:
    """Counts what a forward pass keeps for its backward pass: each storage once, without those it was told to leave out."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: dict[int, Any] = {}

    def leave_out(self, tensor: Tensor) -> None:
        """Not counted: a parameter, an input, or what is there anyway."""
        # The storage itself is held while measuring: memory that is freed and used again would count as seen.
        self._seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def keep(self, value: object) -> None:
        """Count a tensor's storage, unless it was seen before."""
        if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self._seen:
            self.leave_out(value)
            self.num_bytes += value.untyped_storage().nbytes()


_measuring: ContextVar[SavedActivations | None] = ContextVar("measuring", default=None)


def measuring() -> SavedActivations | None:
    """The count that is going on, for what keeps tensors by other ways than autograd's; None where nobody counts."""
    return _measuring.get()


@contextmanager
def measure_saved(model: nn.Module | None = None, *inputs: Tensor) -> Iterator[SavedActivations]:
    """Count the bytes that the forward passes inside keep for their backward passes.

        with measure_saved(model, tokens) as saved:
            loss = objective(tokens)
        print(saved.num_bytes)

    Args:
        model: its parameters and buffers are not counted.
        inputs: not counted either.
    """
    saved = SavedActivations()
    there = [] if model is None else [*model.parameters(), *model.buffers()]
    for tensor in (*there, *inputs):
        saved.leave_out(tensor)

    def pack(tensor: Tensor) -> Tensor:
        saved.keep(tensor)
        return tensor

    token = _measuring.set(saved)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved
    finally:
        _measuring.reset(token)
        saved._seen = {}
