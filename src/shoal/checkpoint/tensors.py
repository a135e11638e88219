"""Tensors as bytes and back. The one place of this room where torch's types meet safetensors' names for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.checkpoint.shard import Blob

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.int64: "I64", torch.uint64: "U64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``F32``.

    Raises:
        ValueError: safetensors has no such type.
    """
    if dtype not in _NAMES:
        raise ValueError(f"a checkpoint cannot hold tensors of type {dtype}")
    return _NAMES[dtype]


def as_blob(tensor: Tensor) -> Blob:
    """The bytes of a contiguous CPU tensor, shared with it."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    # Through a flat view, because a tensor without dims cannot be viewed as bytes.
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return Blob(dtype_name(tensor.dtype), tuple(tensor.shape), flat.numpy().data)


def from_bytes(data: bytearray, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor over ``data``, without a copy."""
    if not data:
        return torch.empty(tuple(shape), dtype=_TYPES[dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(_TYPES[dtype]).reshape(tuple(shape))


def zeros(dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor to be filled from pieces; what none covers is zero."""
    return torch.zeros(tuple(shape), dtype=_TYPES[dtype])


def strided(data: bytearray, dtype: str, shape: Sequence[int], strides: Sequence[int], first: int) -> Tensor:
    """A box of the elements in ``data``, without a copy: ``strides`` and ``first`` count elements."""
    flat = torch.frombuffer(data, dtype=torch.uint8).view(_TYPES[dtype])
    return flat.as_strided(tuple(shape), tuple(strides), first)
