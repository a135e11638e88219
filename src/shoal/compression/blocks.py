"""Block-scaled whole numbers: int8, and int4 two to a byte, with one float32 scale for each block of 128 elements.

The scale is the block's largest magnitude over the largest code, 127 or 7, so the error of an element is at most half of it. A
block that holds a NaN or an infinity has the scale NaN and decodes to NaN: a bad gradient must not arrive as a good one. Decoding
multiplies once and encoding divides once, so where a shard is cut changes no bit as long as it is cut between blocks.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.compression.bits import pack_codes, packed_bytes, unpack_codes
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
from shoal.compression.keyed import round_keyed_

Rounding = Literal["nearest", "keyed"]
DEFAULT_BLOCK = 128


@dataclass(frozen=True)
class BlockInt:
    """Codes of 4 or 8 bits, each times its block's scale. Rounded to nearest (ties to even) or by key, which is unbiased."""

    bits: Literal[4, 8]
    block: int = DEFAULT_BLOCK
    round: Rounding = "nearest"

    has_fixed_size = True

    @property
    def levels(self) -> int:
        """The largest code; the least is its negative, so that zero is a code and both signs are alike."""
        return (1 << (self.bits - 1)) - 1

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """A scale per block, and the codes."""
        codes = (torch.int8, numel) if self.bits == 8 else (torch.uint8, packed_bytes(numel, 4))
        return (torch.float32, count_blocks(numel, offset, self.block)), codes

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """Scales, and codes of 8 or 4 bits."""
        flat = check_flat(flat)
        scales = flat.new_empty(count_blocks(flat.numel(), offset, self.block))
        codes = torch.empty(0 if self.bits == 8 and out else flat.numel(), dtype=torch.int8, device=flat.device)
        if self.bits == 8 and out:
            _, codes = out
        buffer = flat.new_empty(min(flat.numel(), max(CHUNK, self.block)))
        for rows in cut_rows(flat.numel(), offset, self.block):
            values = buffer[: rows.stop - rows.start].view(-1, rows.width)
            torch.abs(rows.view(flat), out=values)
            # A block of denormals alone keeps a normal scale: the bound of half a scale still holds, and most become zero.
            scale = values.amax(1, keepdim=True).div_(self.levels).clamp_(min=SMALLEST_SCALE)
            is_bad = poison_(scale)
            scales[rows.blocks] = scale.squeeze(1)
            torch.div(rows.view(flat), scale, out=values)
            if is_bad:
                # What a NaN becomes as a whole number depends on the processor; the scale says all there is to say.
                values.masked_fill_(scale.isnan(), 0.0)
            if self.round == "keyed":
                round_keyed_(values, key, offset + rows.start).clamp_(-self.levels, self.levels)
            else:
                values.round_()
            rows.view(codes).copy_(values)
        if self.bits == 8:
            return Encoded(deliver((scales, codes), out), offset, key)
        packed = pack_codes(codes.add_(self.levels + 1).view(torch.uint8), 4)
        return Encoded(deliver((scales, packed), out), offset, key)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """Codes times scales."""
        scales, codes = encoded.payload
        flat = room_for(numel, codes, out)
        if self.bits == 8:
            flat.copy_(codes)
        else:
            flat.copy_(unpack_codes(codes, 4, numel)).sub_(self.levels + 1)
        return scale_rows_(flat, scales, encoded.offset, self.block)
