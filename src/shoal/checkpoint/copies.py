"""Copies of the state, in memory that is used again by every save: the loop may go on as soon as they are made."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Copies:
    """One buffer per tensor name. What a save has copied stays unchanged until the next save copies."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous CPU copies of ``tensors``; buffers of names that are no longer saved are given up."""
        buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        # Without autograd, and not one by one for each device: one wait at the end for all copies off an accelerator.
        with torch.no_grad():
            for name, tensor in tensors.items():
                buffers[name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._buffers = buffers
        return buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
