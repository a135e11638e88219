"""Small whole numbers packed into bytes: eight of one bit, four of two or two of four, the first in the lowest bits.

Packing starts anew with each tensor, so the bytes of shards are the bytes of the whole where shards are cut at whole bytes. Words
are read as little-endian, which every machine that torch runs on is.
"""

from functools import lru_cache

import torch
from torch import Tensor

from shoal.compression.codec import CHUNK

# Eight bytes of 0 or 1, times this, have their bits side by side in the highest byte.
_GATHER_BITS = 0x0102040810204080


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes that so many numbers of ``bits`` take."""
    return (numel * bits + 7) // 8


def pack_bits(flags: Tensor) -> Tensor:
    """Bytes of a flat tensor of bools; the rest of the last byte is zero."""
    packed = torch.empty(packed_bytes(flags.numel(), 1), dtype=torch.uint8, device=flags.device)
    whole = flags.numel() // 8 * 8
    for start in range(0, whole, CHUNK):
        words = flags[start : min(start + CHUNK, whole)].view(torch.int64)
        packed[start // 8 : start // 8 + words.numel()] = ((words * _GATHER_BITS) >> 56).bitwise_and_(0xFF)
    if whole < flags.numel():
        last = torch.nn.functional.pad(flags[whole:].to(torch.uint8), (0, 8 - flags.numel() % 8))
        packed[-1] = ((last.view(torch.int64) * _GATHER_BITS) >> 56).bitwise_and_(0xFF)[0]
    return packed


def unpack_signs(packed: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """+1.0 for each bit that is set and -1.0 for the others, flat; in ``out`` where it is given."""
    table = _sign_table(packed.device)
    is_in_place = out is not None and not numel % 8
    signs = out.view(-1, 8) if out is not None and is_in_place else torch.empty(packed.numel(), 8, device=packed.device)
    for start in range(0, packed.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        torch.index_select(table, 0, packed[part].to(torch.int32), out=signs[part])
    found = signs.view(-1)[:numel]
    return found if out is None or is_in_place else out.copy_(found)


@lru_cache(maxsize=8)
def _sign_table(device: torch.device) -> Tensor:
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return (bits * 2 - 1).to(torch.float32).to(device)  # (256, 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Bytes of a flat uint8 tensor of numbers below ``2**bits``, for 2, 4 or 8 bits."""
    while bits < 8:
        if codes.numel() % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        halves = torch.empty(codes.numel() // 2, dtype=torch.uint8, device=codes.device)
        for start in range(0, halves.numel(), CHUNK):
            pairs = codes[2 * start : 2 * (start + CHUNK)].view(torch.int16)
            halves[start : start + CHUNK] = (pairs | (pairs >> (8 - bits))).bitwise_and_(0xFF)
        codes, bits = halves, bits * 2
    return codes


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The flat uint8 tensor of numbers that ``pack_codes`` packed."""
    width = 8
    while width > bits:
        width //= 2
        mask = (1 << width) - 1
        wide = torch.empty(packed.numel(), dtype=torch.int16, device=packed.device)
        for start in range(0, packed.numel(), CHUNK):
            pairs = wide[start : start + CHUNK].copy_(packed[start : start + CHUNK])
            pairs.bitwise_or_(pairs << (8 - width)).bitwise_and_(mask | mask << 8)
        packed = wide.view(torch.uint8)
    return packed[:numel]
