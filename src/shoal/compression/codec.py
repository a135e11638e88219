"""What every codec is: a frozen value that turns a flat float32 tensor into few bytes and back. No collectives, no state.

``numel``, ``offset`` and ``key`` are known to the sender and to the receiver from the plan and the step, so they are not sent.
``offset`` is the global index of a shard's first element: blocks begin at multiples of the block in the *global* numbering, so
shards that are cut at such multiples have the bits of the whole tensor, and a block that a cut divides counts as two blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK = 1 << 16
"""Elements that are worked on at once: a few buffers of them stay in a core's cache, which is worth a factor of three."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. A smaller scale could not be divided by, and would be zero where denormals are flushed."""


Payload = tuple[Tensor, ...]
"""What is sent, flat, the widest dtype first, so that views of one buffer are aligned."""


@dataclass(frozen=True)
class Encoded:
    """A tensor as it is sent, and what both sides know of it."""

    payload: Payload
    offset: int = 0
    """Global index of the first element."""
    key: int = 0
    """The key that random choices were made with."""

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return sum(tensor.nbytes for tensor in self.payload)


Field = tuple[torch.dtype, int]
"""A tensor of a payload: its dtype and its number of elements."""


class Codec(Protocol):
    """A way to send a tensor with fewer bytes."""

    @property
    def has_fixed_size(self) -> bool:
        """True when the payload's size follows from ``numel`` and ``offset``; else ``nbytes`` is its upper bound."""

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """What is sent of a flat float32 tensor, written to the payload ``out`` where it is given; ``flat`` is not changed."""

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """A flat float32 tensor of ``numel`` elements from what was sent: ``out`` where it is given, else a new one."""

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """The tensors of the payload."""


def nbytes(codec: Codec, numel: int, offset: int = 0) -> int:
    """Bytes that ``codec`` sends of so many elements, by its formula; the upper bound where the size is not fixed."""
    return sum(dtype.itemsize * count for dtype, count in codec.fields(numel, offset))


def pack(encoded: Encoded) -> Tensor:
    """The payload as one flat tensor of bytes."""
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in encoded.payload])


def unpack(codec: Codec, buffer: Tensor, numel: int, *, key: int = 0, offset: int = 0) -> Encoded:
    """The payload of a codec with a fixed size as views of one flat tensor of bytes.

    Raises:
        ValueError: the buffer does not have the bytes that the codec sends of ``numel`` elements.
    """
    expected = nbytes(codec, numel, offset)
    if not codec.has_fixed_size or buffer.numel() != expected:
        raise ValueError(f"{codec} sends {expected} bytes of {numel} elements, and there are {buffer.numel()}")
    payload, start = [], 0
    for dtype, count in codec.fields(numel, offset):
        stop = start + dtype.itemsize * count
        payload.append(buffer[start:stop].view(dtype))
        start = stop
    return Encoded(tuple(payload), offset, key)


def deliver(payload: Payload, out: Payload | None) -> Payload:
    """A payload where it is wanted: itself, or copied to ``out``."""
    if out is None:
        return payload
    for target, found in zip(out, payload, strict=True):
        if target.data_ptr() != found.data_ptr():
            target.copy_(found)
    return out


def room_for(numel: int, like: Tensor, out: Tensor | None) -> Tensor:
    """Where ``numel`` float32 are decoded to: ``out``, or a new tensor beside ``like``."""
    return torch.empty(numel, device=like.device) if out is None else out


def check_flat(flat: Tensor) -> Tensor:
    """``flat`` without its graph.

    Raises:
        ValueError: it is not a flat, contiguous float32 tensor.
    """
    if flat.dtype != torch.float32 or flat.ndim != 1 or not flat.is_contiguous():
        raise ValueError(f"codecs take flat, contiguous float32, not {tuple(flat.shape)} of {flat.dtype}")
    return flat.detach()


def count_blocks(numel: int, offset: int, block: int) -> int:
    """Blocks that ``numel`` elements from the global index ``offset`` on touch."""
    return (offset + numel + block - 1) // block - offset // block if numel else 0


@dataclass(frozen=True)
class Rows:
    """Some whole blocks, or one block that the shard has a part of: ``start`` to ``stop``, as rows of ``width``."""

    start: int
    stop: int
    width: int
    first: int
    """Number of the first row's block, counted from the shard's first."""

    @property
    def blocks(self) -> slice:
        """The blocks of these rows."""
        return slice(self.first, self.first + (self.stop - self.start) // self.width)

    def view(self, flat: Tensor) -> Tensor:
        """These rows of a flat tensor, (rows, width)."""
        return flat[self.start : self.stop].view(-1, self.width)


def cut_rows(numel: int, offset: int, block: int) -> Iterator[Rows]:
    """A shard as rows that are blocks, some thousand elements at a time: a part of a block, whole blocks, a part of a block."""
    start = min(-offset % block, numel)
    if start:
        yield Rows(0, start, start, 0)
    first, chunk = int(start > 0), max(1, CHUNK // block) * block
    end = start + (numel - start) // block * block
    for begin in range(start, end, chunk):
        yield Rows(begin, min(begin + chunk, end), block, first + (begin - start) // block)
    if end < numel:
        yield Rows(end, numel, numel - end, first + (end - start) // block)


def sum_rows(rows: Tensor, block: int) -> Tensor:
    """Sums of rows, (rows, width) to (rows, 1), by a tree of halves over a power of two of at least ``block``.

    torch's own sum adds in an order that is free to follow the number of rows, the threads and the device. Here every addition is
    an operation on elements that rounds once, and a row that is shorter than a block is one that ends in zeros.
    """
    size = 1 << max(0, block - 1).bit_length()
    total = rows if rows.shape[1] == size else torch.nn.functional.pad(rows, (0, size - rows.shape[1]))
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


def poison_(scales: Tensor) -> bool:
    """Set scales that are not finite to NaN, so that their blocks decode to NaN; True when there were any."""
    # Scales are not negative, and their largest is NaN where any is.
    if not scales.numel() or math.isfinite(float(scales.max())):
        return False
    scales.masked_fill_(scales.isfinite().logical_not_(), float("nan"))
    return True


def scale_rows_(flat: Tensor, scales: Tensor, offset: int, block: int) -> Tensor:
    """``flat`` times its blocks' scales, in place."""
    for rows in cut_rows(flat.numel(), offset, block):
        rows.view(flat).mul_(scales[rows.blocks].unsqueeze(1))
    return flat
