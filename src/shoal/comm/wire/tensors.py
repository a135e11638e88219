"""A payload as the tensor it is. The only file of the wire that imports torch: who sends no tensors starts without it."""

from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.wire.header import ITEM_BYTES, Header

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


class _Message(Protocol):
    @property
    def header(self) -> Header: ...

    @property
    def payload(self) -> memoryview | None: ...


def as_tensor(message: _Message) -> Tensor:
    """The payload of a request or an answer, not copied, with the dtype and shape that its header says."""
    payload, header = message.payload, message.header
    assert payload is not None, "there is no payload"
    dtype = _DTYPES[header.dtype]
    if not payload.nbytes:
        return torch.empty(header.shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype).reshape(header.shape)
