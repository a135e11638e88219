"""Random numbers by key and global element index, so that neither plan nor resume changes a rounded bit.

``randomness`` draws dropout from numpy's Philox; this room stands on its row and may not use it, and draws where the tensors are,
on any device. The generator is a hash of a counter: two rounds of Wellons' ``lowbias32`` (nullprogram.com/blog/2018/07/31), which
has 32-bit multiplications only, for 64-bit ones are not vectorised. Each round takes another word of the key. It is for rounding
and sampling, and is no cipher.
"""

import torch
from torch import Tensor

from shoal.compression.codec import CHUNK
from shoal.core.seeding import derive_key

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_WORD = 1 << 32


def codec_key(seed: int, step: int, name: str = "") -> int:
    """The key of one tensor (or of all: no name) at one step of a run."""
    return derive_key("compression", seed, step, name)


def draw_bits(key: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """32 random bits, as int32, for each of the global elements ``start`` to ``start + count``."""
    result = torch.empty(count, dtype=torch.int32, device=device)
    done = 0
    while done < count:
        # The low word of an index counts and the high word goes into the key, so a piece ends where the low word does.
        high, low = divmod(start + done, _WORD)
        size = min(count - done, CHUNK, _WORD - low)
        words = derive_key("element", key, high)
        piece = result[done : done + size]
        torch.arange(size, dtype=torch.int32, device=device, out=piece)
        piece.add_(_signed(low)).bitwise_xor_(_signed(words % _WORD))
        _mix_(piece)
        piece.bitwise_xor_(_signed(words // _WORD))
        _mix_(piece)
        done += size
    return result


def draw_uniform(key: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Multiples of 2**-24 from 0 to below 1, as float32, one per element."""
    # A shift to the right keeps the sign; the mask takes it off.
    return (
        draw_bits(key, start, count, device)
        .bitwise_right_shift_(8)
        .bitwise_and_(0xFFFFFF)
        .to(torch.float32)
        .mul_(2.0**-24)
    )


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _mix_(words: Tensor) -> None:
    """One round, in place. int32 multiplication wraps, and shifts to the right are masked because they carry the sign along."""
    words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(_SECOND))
    words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF))


def round_keyed_(values: Tensor, key: int, start: int) -> Tensor:
    """Round to one of the two whole numbers around each value, in place: up with the probability of its fraction.

    The mean is the value to 2**-24 (QSGD, Alistarh et al. 2017, section 3.1). The fraction is exact and is compared, not added: a
    sum of value and draw would round a second time.
    """
    low = values.floor()
    up = draw_uniform(key, start, values.numel(), values.device).view_as(values) < values.sub_(low)
    return values.copy_(low).add_(up)
