"""Shorter floats: fp16 and bf16 as they are, and fp8 (e4m3) with a float32 scale for each block.

fp16 keeps 11 bits and turns what is above 65504 into infinity, which the receiver sees; bf16 keeps 8 bits and the range. fp8
keeps 4 bits, and its scale moves the block's largest magnitude to 448, the largest number of e4m3 (Micikevicius et al. 2022,
table 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import (
    CHUNK,
    SMALLEST_SCALE,
    Encoded,
    Field,
    Payload,
    check_flat,
    count_blocks,
    cut_rows,
    deliver,
    poison_,
    room_for,
    scale_rows_,
)

FP8_LARGEST = 448.0
DEFAULT_BLOCK = 128


@dataclass(frozen=True)
class HalfFloat:
    """Each element rounded to nearest in fp16 or bf16."""

    dtype: torch.dtype

    has_fixed_size = True

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """One short float per element."""
        return ((self.dtype, numel),)

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """The elements as short floats."""
        short = check_flat(flat).to(self.dtype) if out is None else out[0].copy_(check_flat(flat))
        return Encoded((short,), offset, key)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """The elements as float32."""
        return room_for(numel, encoded.payload[0], out).copy_(encoded.payload[0])


@dataclass(frozen=True)
class BlockFloat8:
    """Each element over its block's scale, rounded to nearest in e4m3."""

    block: int = DEFAULT_BLOCK

    has_fixed_size = True

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """A scale per block and a byte per element."""
        return (torch.float32, count_blocks(numel, offset, self.block)), (torch.uint8, numel)

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """Scales, and the bytes of e4m3 floats."""
        flat = check_flat(flat)
        scales = flat.new_empty(count_blocks(flat.numel(), offset, self.block))
        codes = (torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device) if out is None else out[1]).view(
            torch.float8_e4m3fn
        )
        buffer = flat.new_empty(min(flat.numel(), max(CHUNK, self.block)))
        for rows in cut_rows(flat.numel(), offset, self.block):
            values = buffer[: rows.stop - rows.start].view(-1, rows.width)
            torch.abs(rows.view(flat), out=values)
            scale = values.amax(1, keepdim=True).div_(FP8_LARGEST).clamp_(min=SMALLEST_SCALE)
            is_bad = poison_(scale)
            scales[rows.blocks] = scale.squeeze(1)
            torch.div(rows.view(flat), scale, out=values)
            if is_bad:
                values.masked_fill_(scale.isnan(), 0.0)
            rows.view(codes).copy_(values)
        return Encoded(deliver((scales, codes.view(torch.uint8)), out), offset, key)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """Floats times scales."""
        scales, codes = encoded.payload
        flat = room_for(numel, codes, out).copy_(codes.view(torch.float8_e4m3fn))
        return scale_rows_(flat, scales, encoded.offset, self.block)
