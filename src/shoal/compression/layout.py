"""Who sums which part of which tensor, and how long the messages are: plain numbers, from shapes and the rule alone.

    rank 0 of 2 | a ............ | b ... |              compressed tensors in the order of names, cut at multiples of the block
    rank 1 of 2                          | b ......... |
    plain       | a.bias | norm |                       small tensors and vectors: one dense message

Under ZeRO the cuts are those of the shards, and each piece is widened to whole blocks: a block that a shard's cut divides goes to
both owners, so that the cut changes no bit.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from torch import Tensor

from shoal.compression.codec import Codec, nbytes
from shoal.compression.config import CompressionConfig
from shoal.compression.powersgd import is_worth, matrix_shape
from shoal.core.compressrule import CompressRule
from shoal.core.placement import Shape

Way = Literal["blocks", "selected", "random", "factors"]
"""How a method is summed: each rank adds up a slice; all get all selections; the same places are summed; two thin factors."""

ALIGNMENT = 4
"""Each payload starts at a multiple of so many bytes of its message, so that its floats can be read where they are."""
LONGEST_PIECE = 1 << 18
"""Elements of a piece: its buffers stay in the cache, and their memory is used again by the next. No bit depends on it."""
_NO_BLOCK = 8

Owned = Sequence[Mapping[str, tuple[int, int]]]
"""For each rank, the elements of each tensor that it needs the sum of: first and end."""


@dataclass(frozen=True)
class TensorPart:
    """What a rank holds of a parameter: all of it, or the elements from ``offset`` on."""

    shape: Shape
    """Of the whole parameter."""
    offset: int = 0
    """Element index of the first element."""
    numel: int | None = None
    """Elements; None for all of the parameter."""
    before: int = 0
    """Elements at the beginning that another rank holds: they make a block whole."""
    behind: int = 0
    """The same at the end."""

    @property
    def size(self) -> int:
        """Elements of the part."""
        return math.prod(self.shape) if self.numel is None else self.numel

    def own(self, flat: Tensor) -> Tensor:
        """The elements of a flat tensor of the part that no other rank holds."""
        return flat[self.before : self.size - self.behind]


def whole_blocks(shape: Shape, first: int, end: int, block: int) -> TensorPart:
    """What a rank codes that holds the elements ``first`` to ``end`` of a parameter: whole blocks, where it has any."""
    if first >= end:
        return TensorPart(shape, first, 0)
    low, high = first // block * block, min(-(-end // block) * block, math.prod(shape))
    return TensorPart(shape, low, high - low, before=first - low, behind=high - end)


@dataclass(frozen=True)
class Piece:
    """Some elements of a tensor that are encoded together."""

    name: str
    start: int
    """Its first element, counted from the first that the ranks hold of the tensor."""
    stop: int
    offset: int
    """Its first element's index in the whole parameter."""

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start


def way_of(rule: CompressRule) -> Way:
    """How the rule's method is summed."""
    match rule.kind:
        case "topk" | "threshold" | "dgc":
            return "selected"
        case "randk":
            return "random"
        case "powersgd":
            return "factors"
    return "blocks"


def is_compressed(shape: Sequence[int], rule: CompressRule, config: CompressionConfig) -> bool:
    """True for a parameter that goes compressed: of two dims or more, large enough, and for PowerSGD worth its factors."""
    if len(shape) < 2 or math.prod(shape) < max(1, config.min_elements):
        return False
    return rule.kind != "powersgd" or is_worth(shape, int(rule.number), min_rate=config.min_rate)


def factor_rank(shape: Sequence[int], rank: int) -> tuple[int, int, int]:
    """Rows, columns and the rank of PowerSGD's factors, which is at most either side."""
    matrix = matrix_shape(shape)
    assert matrix is not None, "PowerSGD leaves vectors alone"
    return *matrix, min(rank, *matrix)


def block_of(codec: Codec) -> int:
    """Elements at whose multiples tensors may be cut; codecs of single elements may be cut at any byte of their signs."""
    return int(getattr(codec, "block", _NO_BLOCK))


def cut_block(codec: Codec, back: Codec | None) -> int:
    """Elements at whose multiples sums are dealt out: between blocks of the way there and of the way back."""
    return block_of(codec) if back is None else math.lcm(block_of(codec), block_of(back))


def cut_evenly(parts: Mapping[str, TensorPart], num_ranks: int, block: int) -> list[list[Piece]]:
    """The pieces each rank adds up: a contiguous slice of all tensors, cut at the multiple of the block below its share."""
    names = list(parts)
    *starts, total = [0, *accumulate(part.size for part in parts.values())]
    cuts = [0]
    for rank in range(1, num_ranks):
        share = total * rank // num_ranks
        index = max(0, bisect.bisect_right(starts, share) - 1)
        if not names:
            cuts.append(0)
            continue
        offset = parts[names[index]].offset
        inside = (offset + share - starts[index]) // block * block - offset
        cuts.append(max(cuts[-1], starts[index] + max(0, inside)))
    cuts.append(total)
    found: list[list[Piece]] = []
    for first, end in pairwise(cuts):
        own: list[Piece] = []
        for (name, part), begin in zip(parts.items(), starts, strict=True):
            low, high = max(first, begin) - begin, min(end, begin + part.size) - begin
            own += _cut_piece(name, low, high, part.offset, block)
        found.append(own)
    return found


def _cut_piece(name: str, low: int, high: int, offset: int, block: int) -> Iterator[Piece]:
    """A range of a tensor as pieces, cut at multiples of the block again: a large one would be worked on out of the cache."""
    longest = max(1, LONGEST_PIECE // block) * block
    while low < high:
        stop = min(high, (offset + low) // block * block + longest - offset)
        yield Piece(name, low, stop, offset + low)
        low = stop


def cut_as_owned(parts: Mapping[str, TensorPart], owned: Owned, block: int) -> list[list[Piece]]:
    """The pieces that each rank needs for its shards, widened to whole blocks."""
    found: list[list[Piece]] = []
    for ranges in owned:
        own: list[Piece] = []
        for name, part in parts.items():
            first, end = ranges.get(name, (0, 0))
            if first < end:
                low = max(0, (part.offset + first) // block * block - part.offset)
                high = min(part.size, -(-(part.offset + end) // block) * block - part.offset)
                own += _cut_piece(name, low, high, part.offset, block)
        found.append(own)
    return found


def aligned(num_bytes: int) -> int:
    """The bytes of a payload with what fills it up to the next one."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def message_bytes(codec: Codec, pieces: Sequence[Piece]) -> int:
    """Bytes of the message that holds these pieces."""
    return sum(aligned(nbytes(codec, piece.numel, piece.offset)) for piece in pieces)
