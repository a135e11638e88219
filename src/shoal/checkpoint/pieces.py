"""From local tensors to the pieces that are written: what a rank holds, views of it, and the bytes of what it was given to write.

The counterpart for reading is ``reader.py``. A piece is looked for in the placement's patches and never assumed to be one of
them, because where two ranks' boxes overlap in part, one of them writes only a part of its own. Here, and nowhere else in this
room, torch's types meet safetensors' names for them.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.checkpoint.boxes import Box, contains
from shoal.checkpoint.holdings import Cut, Holding, hold
from shoal.checkpoint.shard import Blob
from shoal.core.placement import Placement, Shape, place_whole

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


def list_holdings(tensors: Mapping[str, Tensor], placements: Mapping[str, Placement]) -> dict[str, Holding]:
    """What this rank holds; a tensor without a placement is whole.

    Raises:
        ValueError: a tensor has another shape than its placement, or a type that cannot be saved.
    """
    listing = {}
    for name, tensor in tensors.items():
        placement = placements.get(name) or place_whole(tensor.shape)
        if placement.local_shape != tuple(tensor.shape):
            raise ValueError(f"{name!r} is {tuple(tensor.shape)}, and its placement says {placement.local_shape}")
        listing[name] = hold(dtype_name(tensor.dtype), placement)
    return listing


def view_cuts(
    tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], cuts: Iterable[Cut]
) -> dict[Cut, Tensor]:
    """The parts of the local tensors that these pieces are; nothing is copied.

    Raises:
        ValueError: two pieces would be written under one key.
    """
    views: dict[Cut, Tensor] = {}
    keys = set()
    for cut in cuts:
        placement = placements.get(cut.name) or place_whole(cut.shape)
        views[cut] = _view(tensors[cut.name], placement, cut.box)
        if cut.key in keys:
            raise ValueError(f"two pieces would both be called {cut.key!r}; rename the tensor of that name")
        keys.add(cut.key)
    return views


def blobs_of(cuts: Iterable[Cut], copies: Mapping[Cut, Tensor]) -> dict[str, Blob]:
    """The bytes of the pieces to write, by key, from the copies that were made.

    Raises:
        ValueError: a piece is in none of the copies.
    """
    by_name: dict[str, list[tuple[Cut, Tensor]]] = {}
    for copied, tensor in copies.items():
        by_name.setdefault(copied.name, []).append((copied, tensor))
    return {cut.key: as_blob(_find(cut, by_name.get(cut.name, ()))) for cut in cuts}


def _find(cut: Cut, copies: Iterable[tuple[Cut, Tensor]]) -> Tensor:
    for copied, tensor in copies:
        if copied.box == cut.box:
            return tensor
        if contains(copied.box, cut.box):
            start = tuple(low - origin for low, origin in zip(cut.box.start, copied.box.start, strict=True))
            return tensor[region(start, cut.box.shape)].contiguous()
    raise ValueError(
        f"{cut.key!r} was not copied, because another rank wrote it at the last save; the next save will copy it"
    )


def _view(tensor: Tensor, placement: Placement, box: Box) -> Tensor:
    if not box.num_elements:
        return tensor.new_empty(box.shape)
    for patch in placement.patches:
        if contains(Box(patch.whole_start, patch.shape), box):
            offset = (low - origin for low, origin in zip(box.start, patch.whole_start, strict=True))
            start = tuple(local + by for local, by in zip(patch.local_start, offset, strict=True))
            return tensor.detach()[region(start, box.shape)]
    raise AssertionError(f"a placement of {placement.whole_shape} lists {box} and has no patch that holds it")


def region(start: Shape, shape: Shape) -> tuple[slice, ...]:
    """The index of a box of a tensor."""
    return tuple(slice(first, first + extent) for first, extent in zip(start, shape, strict=True))
