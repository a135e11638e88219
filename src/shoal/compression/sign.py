"""One bit per element: its sign, times the mean magnitude of its block.

The scale is what makes a sign with error feedback converge (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", section 4:
the scaled sign). Zero counts as positive, -0.0 too, so that one bit says it all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.bits import pack_bits, packed_bytes, unpack_signs
from shoal.compression.codec import (
    Encoded,
    Field,
    Payload,
    check_flat,
    count_blocks,
    cut_rows,
    deliver,
    poison_,
    scale_rows_,
    sum_rows,
)

DEFAULT_BLOCK = 1024


@dataclass(frozen=True)
class Sign:
    """Signs as bits, and a float32 scale per block: its mean magnitude."""

    block: int = DEFAULT_BLOCK

    has_fixed_size = True

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """A scale per block and a bit per element."""
        return (torch.float32, count_blocks(numel, offset, self.block)), (torch.uint8, packed_bytes(numel, 1))

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """Scales and bits."""
        flat = check_flat(flat)
        scales = flat.new_empty(count_blocks(flat.numel(), offset, self.block))
        for rows in cut_rows(flat.numel(), offset, self.block):
            scales[rows.blocks] = sum_rows(rows.view(flat).abs(), self.block).squeeze(1).div_(rows.width)
        poison_(scales)
        return Encoded(deliver((scales, pack_bits(flat >= 0)), out), offset, key)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """Scales with the signs."""
        scales, packed = encoded.payload
        return scale_rows_(unpack_signs(packed, numel, out), scales, encoded.offset, self.block)
