"""Weights gathered as int8 or int4 under ZeRO (ZeRO++'s qwZ, Wang et al. 2023, section 3.1); shards keep float32 masters.

Passes read ``decode(encode(w))``. Blocks lie inside rows, and shards are cut between rows, so neither the stage nor the number of
ranks changes a bit of what a pass reads. ZeRO++ leaves tensors out that the number of ranks does not divide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.compression.blocks import DEFAULT_BLOCK, BlockInt
from shoal.compression.codec import nbytes, unpack
from shoal.compression.config import CompressionConfig
from shoal.compression.layout import aligned
from shoal.parallel.zero.layout import Slot, ZeroLayout

LEAST_BLOCK = 16
"""A row without a divisor of so many elements would need more scales than it is worth."""
_FLOAT = 4


def block_for(row: int, most: int) -> int:
    """Elements that share a scale: the most that divide a row."""
    return next(size for size in range(min(row, most), 0, -1) if row % size == 0)


@dataclass(frozen=True)
class _Rows:
    """A rank's rows of one parameter."""

    codec: BlockInt | None
    """None where they are sent as they are."""
    offset: int
    """Index of the first element in the parameter."""
    numel: int
    in_unit: int
    in_shard: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the message."""
        return _FLOAT * self.numel if self.codec is None else aligned(nbytes(self.codec, self.numel, self.offset))


@dataclass(frozen=True)
class WeightCodec:
    """How the units of a layout are gathered."""

    layout: ZeroLayout
    config: CompressionConfig

    def counts(self, index: int) -> list[int]:
        """Bytes of each rank's message of a unit."""
        return [sum(rows.num_bytes for rows in held) for held in self._rows[index]]

    @torch.no_grad()
    def gather(self, index: int, shard: Tensor, whole: Tensor, channel: Channel) -> None:
        """Put what all ranks hold of a unit, as it is after its codec, into ``whole``."""
        parts: list[Tensor] = []
        for rows in self._rows[index][channel.rank]:
            parts += _bytes_of(rows, shard[rows.in_shard : rows.in_shard + rows.numel])
        counts = self.counts(index)
        received = torch.empty(sum(counts), dtype=torch.uint8, device=shard.device)
        own = torch.cat(parts) if parts else received[:0]
        channel.all_gather(own, received, counts)
        for held, message in zip(self._rows[index], torch.split(received, counts), strict=True):
            start = 0
            for rows in held:
                target = whole[rows.in_unit : rows.in_unit + rows.numel]
                if rows.codec is None:
                    target.copy_(message[start : start + rows.num_bytes].view(torch.float32))
                else:
                    size = nbytes(rows.codec, rows.numel, rows.offset)
                    payload = unpack(rows.codec, message[start : start + size], rows.numel, offset=rows.offset)
                    target.copy_(rows.codec.decode(payload, rows.numel))
                start += rows.num_bytes

    @cached_property
    def _rows(self) -> list[list[list[_Rows]]]:
        """By unit and rank."""
        found = []
        for unit in self.layout.units:
            by_rank = []
            for rank in range(self.layout.num_ranks):
                held = []
                for slot in unit.slots:
                    first, end = slot.rows(rank)
                    if first < end:
                        start = first * slot.row
                        numel, in_shard = (end - first) * slot.row, unit.local_offset(slot, rank)
                        held.append(_Rows(self._codec(slot), start, numel, slot.offset + start, in_shard))
                by_rank.append(held)
            found.append(by_rank)
        return found

    def _codec(self, slot: Slot) -> BlockInt | None:
        if len(slot.shape) < 2 or slot.numel < max(1, self.config.min_elements):
            return None
        block = block_for(slot.row, self.config.block or DEFAULT_BLOCK)
        return None if block < LEAST_BLOCK else BlockInt(8 if self.config.weights == "int8" else 4, block)


def _bytes_of(rows: _Rows, weights: Tensor) -> Sequence[Tensor]:
    if rows.codec is None:
        return [weights.contiguous().view(torch.uint8)]
    payload = rows.codec.encode(weights, offset=rows.offset).payload
    parts = [tensor.view(torch.uint8) for tensor in payload]
    filling = rows.num_bytes - sum(part.numel() for part in parts)
    return [*parts, *([parts[0].new_zeros(filling)] if filling else [])]
