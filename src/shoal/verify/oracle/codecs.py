"""Codecs of gradients as formulas, written a second time: a bug that both sides shared would be equal on both.

Everything here is numpy over whole slices and says what a receiver decodes, in float32; how it is packed into bytes is no concern
of a proof's. No code of ``compression/``. Each operation rounds once per element, so both sides have the same bits.

Random draws belong to (key, element): two rounds of Wellons' ``lowbias32`` hash of the element's index, the first with the low
word of the key and the second with its high word. A block begins at each multiple of its size in the numbering of the whole
parameter; a slice that begins or ends inside a block has a shorter one there.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from shoal.core.compressrule import CompressRule
from shoal.core.seeding import derive_key

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
Codec = Callable[[Floats, int, int], Floats]
"""A flat slice, the key, and the index of its first element in the whole parameter; gives what a receiver decodes."""
_Rows = Callable[[Floats, NDArray[np.int64], int], Floats]
"""Blocks as rows, the index of every element, and the key."""

_TINY = np.float32(2.0**-126)
"""The least normal float32: no scale is below it."""
_BLOCKS = {"fp8": 128, "int8": 128, "int4": 128, "qsgd": 512, "sign": 1024, "onebit": 1024}
_E4M3_LARGEST, _E4M3_SPACING, _E4M3_BITS = np.float32(448.0), 2.0**-9, 3
_LARGEST_DENOMINATOR = 10**6


def key_of(seed: int, step: int, name: str) -> int:
    """The key of a tensor's random draws at a step."""
    return derive_key("compression", seed, step, name)


def draw_words(key: int, elements: NDArray[np.int64]) -> Words:
    """32 random bits for each element, by its index."""
    drawn = np.empty(elements.shape, dtype=np.uint32)
    highs = elements >> 32
    for high in np.unique(highs):
        words = derive_key("element", key, int(high))
        own = highs == high
        mixed = _lowbias32((elements[own] & 0xFFFFFFFF).astype(np.uint32) ^ np.uint32(words & 0xFFFFFFFF))
        drawn[own] = _lowbias32(mixed ^ np.uint32(words >> 32))
    return drawn


def _lowbias32(x: Words) -> Words:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def draw_uniform(key: int, elements: NDArray[np.int64]) -> Floats:
    """The 24 highest bits of each draw as a fraction in [0, 1)."""
    return (draw_words(key, elements) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _round_at_random(values: Floats, elements: NDArray[np.int64], key: int) -> Floats:
    """Up with the probability of the fraction (Alistarh et al. 2017, section 3.1)."""
    low = np.floor(values)
    return low + (draw_uniform(key, elements) < values - low).astype(np.float32)


def _blockwise(size: int, rule: _Rows) -> Codec:
    def decode(flat: Floats, key: int, offset: int) -> Floats:
        elements = np.arange(offset, offset + flat.size, dtype=np.int64)
        result = np.empty_like(flat)
        for part in _parts(flat.size, offset, size):
            width = min(size, part.stop - part.start)
            shape = (-1, width)
            with np.errstate(all="ignore"):
                result[part] = rule(flat[part].reshape(shape), elements[part].reshape(shape), key).reshape(-1)
        return result

    return decode


def _parts(count: int, offset: int, size: int) -> Iterator[slice]:
    """The end of a block that began before the slice, all whole blocks, and the beginning of one that goes on after it."""
    head = min((size - offset % size) % size, count)
    whole = head + (count - head) // size * size
    for start, stop in ((0, head), (head, whole), (whole, count)):
        if start < stop:
            yield slice(start, stop)


def _settle(scales: Floats) -> Floats:
    """A scale that is not finite is NaN, and its block too: what is bad must not arrive as good."""
    return np.where(np.isfinite(scales), scales, np.float32(np.nan))


def _largest(rows: Floats) -> Floats:
    # np.max passes a NaN on, as it must.
    found: Floats = np.max(np.abs(rows), axis=1, keepdims=True)
    return found


def _sum_by_halves(rows: Floats, size: int) -> Floats:
    """Sums of rows as a binary tree: the first half is added to the second, of a power of two of at least ``size``."""
    width = 2 ** int(np.ceil(np.log2(size)))
    padded = np.zeros((rows.shape[0], width), dtype=np.float32)
    padded[:, : rows.shape[1]] = rows
    while padded.shape[1] > 1:
        left, right = np.split(padded, 2, axis=1)
        padded = left + right
    return padded


def _whole_numbers(levels: int, *, at_random: bool) -> _Rows:
    """Codes of -levels to levels, each times the block's largest magnitude over ``levels``."""

    def decode(rows: Floats, elements: NDArray[np.int64], key: int) -> Floats:
        scales = _settle(np.maximum(_largest(rows) / np.float32(levels), _TINY))
        values = np.where(np.isnan(scales), np.float32(0), rows / scales)
        drawn = np.clip(_round_at_random(values, elements, key), -levels, levels) if at_random else None
        codes = np.rint(values) if drawn is None else drawn
        # A code has no sign of zero: + 0.0 takes it off.
        return (codes + np.float32(0)) * scales

    return decode


def _short_floats(rows: Floats, elements: NDArray[np.int64], key: int) -> Floats:
    """e4m3: three bits after the leading one, none finer than 2**-9 (Micikevicius et al. 2022, table 1)."""
    scales = _settle(np.maximum(_largest(rows) / _E4M3_LARGEST, _TINY))
    values = np.where(np.isnan(scales), np.float32(0), rows / scales)
    _, exponents = np.frexp(values)
    spacing = np.maximum(np.ldexp(np.float32(1), exponents - 1 - _E4M3_BITS), np.float32(_E4M3_SPACING))
    codes: Floats = np.rint(values / spacing) * spacing
    return codes * scales


def _levels_of_norm(levels: int, size: int) -> _Rows:
    """QSGD: levels of the block's Euclidean norm, rounded at random (Alistarh et al. 2017, section 3.1)."""

    def decode(rows: Floats, elements: NDArray[np.int64], key: int) -> Floats:
        largest = np.maximum(_largest(rows), _TINY)
        norm = np.sqrt(_sum_by_halves(np.square(rows / largest), size)) * largest
        scales = _settle(np.maximum(norm / np.float32(levels), _TINY))
        values = np.where(np.isnan(scales), np.float32(0), rows / scales)
        codes = np.clip(_round_at_random(values, elements, key), -levels, levels)
        return (codes + np.float32(0)) * scales

    return decode


def _scaled_sign(size: int) -> _Rows:
    """The sign times the block's mean magnitude; zero is positive (Karimireddy et al. 2019, section 4)."""

    def decode(rows: Floats, elements: NDArray[np.int64], key: int) -> Floats:
        scales = _settle(_sum_by_halves(np.abs(rows), size) / np.float32(rows.shape[1]))
        return np.where(rows >= 0, np.float32(1), np.float32(-1)) * scales

    return decode


def _natural(flat: Floats, key: int, offset: int) -> Floats:
    """One of the two powers of two around, up with the chance that makes it right on the mean (Horvath et al. 2019).

    Below 2**-126 the two are 0 and 2**-126; there is none above 2**127.
    """
    elements = np.arange(offset, offset + flat.size, dtype=np.int64)
    with np.errstate(all="ignore"):
        size = np.abs(flat)
        fractions, exponents = np.frexp(size)
        is_small = size < _TINY
        # 23 bits after the leading one; of what is small, all.
        rest = np.where(is_small, np.ldexp(size, 149), np.ldexp(2 * fractions - 1, 23))
        rest = np.where(np.isfinite(size), rest, 0).astype(np.int64)
        goes_up = rest + (draw_words(key, elements) & np.uint32(0x7FFFFF)) >= 2**23
        power = np.minimum(np.where(is_small, -126, exponents - 1 + goes_up), 127)
        found = np.where(is_small & ~goes_up, np.float32(0), np.ldexp(np.float32(1), power))
        found = np.where(flat >= 0, found, -found)
    return np.where(np.isfinite(flat), found, np.float32(np.nan)).astype(np.float32)


def _half(flat: Floats, key: int, offset: int) -> Floats:
    with np.errstate(all="ignore"):
        return flat.astype(np.float16).astype(np.float32)


def _brain(flat: Floats, key: int, offset: int) -> Floats:
    """bfloat16 is the upper half of a float32; the lower half rounds it to nearest, of two as near to the even one."""
    words = flat.view(np.uint32).astype(np.uint64)
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000
    found = rounded.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(flat), np.float32(np.nan), found)


def block_codec(rule: CompressRule, *, block: int | None, at_random: bool) -> Codec:
    """The codec of a kind that codes every element.

    Args:
        rule: the plan's.
        block: elements with one scale, where the plan does not say; None: as the method has it.
        at_random: how int8 and int4 are rounded.
    """
    size = rule.block or block or _BLOCKS.get(rule.kind, 0)
    match rule.kind:
        case "fp16":
            return _half
        case "bf16":
            return _brain
        case "natural":
            return _natural
        case "fp8":
            return _blockwise(size, _short_floats)
        case "int8":
            return _blockwise(size, _whole_numbers(127, at_random=at_random))
        case "int4":
            return _blockwise(size, _whole_numbers(7, at_random=at_random))
        case "qsgd":
            return _blockwise(size, _levels_of_norm(2 ** (int(rule.number) - 1) - 1, size))
        case "sign" | "onebit":
            return _blockwise(size, _scaled_sign(size))
    raise AssertionError(f"{rule.kind} codes no elements")


def largest_places(flat: Floats, ratio: float) -> NDArray[np.int64]:
    """Places of the largest magnitudes, at least one; of equal ones the first, and what is not a number before all others."""
    count = min(flat.size, max(1, int(ratio * flat.size)))
    sizes = np.abs(flat).view(np.int32).astype(np.int64)
    return np.argsort(-sizes, kind="stable")[:count]


def places_above(flat: Floats, threshold: float) -> NDArray[np.int64]:
    """Places of magnitudes of at least the threshold, and of what is not a number."""
    return np.flatnonzero(~(np.abs(flat) < np.float32(threshold)))


def random_ranges(count: int, ratio: float, key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One place of each range of ``1 / ratio`` elements, and how many the range has.

    Range j begins at ``floor(j / ratio)``, and draw j chooses in it.
    """
    share = max(Fraction(ratio).limit_denominator(_LARGEST_DENOMINATOR), Fraction(1, _LARGEST_DENOMINATOR))
    starts, place = [], 0
    while place < count:
        starts.append(place)
        place = len(starts) * share.denominator // share.numerator
    edges = np.array([*starts, count], dtype=np.int64)
    widths = np.diff(edges)
    words = draw_words(key, np.arange(len(starts), dtype=np.int64)).astype(np.uint64)
    # A product of 32 bits and a width below 2**32: nothing is lost.
    return edges[:-1] + (words * widths.astype(np.uint64) >> np.uint64(32)).astype(np.int64), widths


def only(flat: Floats, places: NDArray[np.int64]) -> Floats:
    """The tensor with zeros everywhere but at some places."""
    found = np.zeros_like(flat)
    found[places] = flat[places]
    return found
