"""Unbiased codecs, by rounding at random with a key: QSGD's levels of a norm, and natural compression's powers of two."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.compression.bits import pack_bits, pack_codes, packed_bytes, unpack_codes, unpack_signs
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
    sum_rows,
)
from shoal.compression.keyed import draw_bits, round_keyed_

DEFAULT_BLOCK = 512
_INFINITY = 0x7F800000
_MANTISSA = 23


@dataclass(frozen=True)
class QSGD:
    """``norm * sign(x) * level / s`` with ``s = 2**(bits - 1) - 1`` levels of each block's Euclidean norm.

    Alistarh et al. 2017, section 3.1: the level is one of the two around ``s |x| / norm``, with the mean of it.
    """

    bits: Literal[2, 4, 8]
    block: int = DEFAULT_BLOCK

    has_fixed_size = True

    @property
    def levels(self) -> int:
        """s, the number of levels above zero."""
        return (1 << (self.bits - 1)) - 1

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """A scale per block, and the levels with their signs."""
        return (torch.float32, count_blocks(numel, offset, self.block)), (torch.uint8, packed_bytes(numel, self.bits))

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """Norms over ``s``, and levels."""
        flat = check_flat(flat)
        scales = flat.new_empty(count_blocks(flat.numel(), offset, self.block))
        codes = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
        for rows in cut_rows(flat.numel(), offset, self.block):
            values = rows.view(flat)
            # Squares of small or large elements would leave float32, so the norm is taken of the block over its largest.
            largest = values.abs().amax(1, keepdim=True).clamp_(min=SMALLEST_SCALE)
            squares = sum_rows((values / largest).square_(), self.block)
            # torch's float32 root is not the nearest on every processor; that of a float64 is, once it is a float32 again.
            norm = squares.to(torch.float64).sqrt_().to(torch.float32).mul_(largest)
            scale = norm.div_(self.levels).clamp_(min=SMALLEST_SCALE)
            poison_(scale)
            scales[rows.blocks] = scale.squeeze(1)
            # Rounding x instead of |x| is the same rule: it goes to one of the two levels around, with the mean of it.
            chosen = round_keyed_((values / scale).masked_fill_(scale.isnan(), 0.0), key, offset + rows.start)
            rows.view(codes).copy_(chosen.clamp_(-self.levels, self.levels).add_(self.levels))
        return Encoded(deliver((scales, pack_codes(codes, self.bits)), out), offset, key)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """Levels times scales."""
        scales, packed = encoded.payload
        flat = room_for(numel, packed, out).copy_(unpack_codes(packed, self.bits, numel)).sub_(self.levels)
        return scale_rows_(flat, scales, encoded.offset, self.block)


@dataclass(frozen=True)
class Natural:
    """Each element as one of the two powers of two around it, with the mean of it: a sign and an exponent, nine bits.

    Horvath et al. 2019, definition 1. On the bits of a float32 it is one addition: a random mantissa carries into the exponent
    with the right chance, and denormals, whose neighbours are 0 and 2**-126, follow the same rule. Any cut has the same bits.
    """

    has_fixed_size = True

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """An exponent and a sign per element."""
        return (torch.uint8, numel), (torch.uint8, packed_bytes(numel, 1))

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """Exponents and signs; 255 stands for what is not finite, and finite elements stay below 2**128."""
        flat = check_flat(flat)
        exponents = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device) if out is None else out[0]
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK]
            words = (part.view(torch.int32) & 0x7FFFFFFF).clamp_(max=_INFINITY)
            bad = words == _INFINITY
            drawn = draw_bits(key, offset + start, part.numel(), flat.device)
            words.add_(drawn.bitwise_and_((1 << _MANTISSA) - 1)).bitwise_right_shift_(_MANTISSA)
            exponents[start : start + CHUNK] = words.clamp_(max=254).masked_fill_(bad, 255)
        return Encoded(deliver((exponents, pack_bits(flat >= 0)), out), offset, key)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """Powers of two with signs; NaN for what was not finite."""
        exponents, signs = encoded.payload
        sizes = room_for(numel, exponents, out)
        sizes.view(torch.int32).copy_(exponents).bitwise_left_shift_(_MANTISSA)
        return sizes.mul_(unpack_signs(signs, numel)).masked_fill_(exponents == 255, float("nan"))
