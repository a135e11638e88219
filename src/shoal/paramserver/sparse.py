"""Gradients that touch few rows of a tensor, as those of an embedding do: only these rows are sent.

Which tensors are worth it is measured in the first pushes; after these only they are looked at. What a server makes of the rows
has the bits of the whole gradient, so this is a matter of the wire alone. What was measured may also say which shards a worker
caches (``cold_shards``).

    payload   | row numbers, int64, of each such tensor | the rest of the shard | rows of each such tensor |
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shoal.core.errors import RunError
from shoal.paramserver.sharding import Model, Piece, Shard, ShardMap

Index = tuple[tuple[str, int], ...]
"""Tensors of a shard, in its order, of which only so many rows are in a payload."""

MEASURED_PUSHES = 3
MOST_ROWS = 0.25
"""Share of its rows, in the mean of the measured pushes, up to which a tensor is worth looking at."""
MOSTLY = 0.9
"""Share of a shard that tensors of few touched rows must be for the shard to count as cold."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrongGradient(RunError):
    """A gradient that does not fit the shard; it is not stored."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A sparse gradient of one parameter: the rows that are not zero."""

    indices: Tensor
    """Rows of the whole parameter, int64, increasing."""
    values: Tensor
    """Their gradients, one row each."""


class RowPacker:
    """A worker's side: finds the rows, and packs them.

    Args:
        shard_map: how the model is cut.
        model: the trained parameters.
        only: the tensors that are looked at; left out, all that have rows.
    """

    def __init__(self, shard_map: ShardMap, model: Model, *, only: Collection[str] | None = None) -> None:
        self._shards = shard_map.shards
        self._widths = {name: math.prod(spec.shape[1:]) for name, spec in model.items() if len(spec.shape) >= 2}
        if only is not None:
            self._widths = {name: width for name, width in self._widths.items() if name in only}
        self._watched = [
            [piece for piece in shard.pieces if piece.name in self._widths and piece.numel] for shard in self._shards
        ]
        self._seen = [0] * len(self._shards)
        self._touched: dict[tuple[int, str], float] = {}

    def sparse_names(self) -> frozenset[str]:
        """The tensors that are being looked at."""
        return frozenset(piece.name for pieces in self._watched for piece in pieces)

    def cold_shards(self) -> frozenset[int]:
        """Shards that are measured, and hold hardly anything but tensors of which few rows are touched."""
        return frozenset(
            shard.number
            for shard, watched, seen in zip(self._shards, self._watched, self._seen, strict=True)
            if seen >= MEASURED_PUSHES and sum(piece.numel for piece in watched) >= MOSTLY * shard.numel > 0
        )

    def pack(self, number: int, gradient: Tensor) -> tuple[Index, Tensor]:
        """A shard's part of a gradient as it is to be sent; with an empty index it is as given."""
        rows: dict[str, Rows] = {}
        for piece in self._watched[number]:
            found = self._rows(piece, gradient)
            count = piece.numel // self._widths[piece.name]
            self._touched[number, piece.name] = (
                self._touched.get((number, piece.name), 0.0) + len(found.indices) / count
            )
            if 2 * len(found.indices) <= count:
                rows[piece.name] = found
        self._seen[number] += 1
        if self._seen[number] == MEASURED_PUSHES:
            limit = MOST_ROWS * MEASURED_PUSHES
            kept = [piece for piece in self._watched[number] if self._touched[number, piece.name] <= limit]
            self._watched[number] = kept
        return pack_rows(self._shards[number], gradient, rows) if rows else ((), gradient)

    def _rows(self, piece: Piece, gradient: Tensor) -> Rows:
        width = self._widths[piece.name]
        part = gradient[piece.offset : piece.offset + piece.numel].view(-1, width)
        # By bits: a row of negative zeros is not the row of zeros that a server would put in its place.
        is_touched = (part.view(_BITS[part.element_size()]) != 0).any(dim=1)
        own = is_touched.nonzero().view(-1)
        return Rows(indices=own + piece.start // width, values=part[own])


def pack_rows(shard: Shard, gradient: Tensor, rows: dict[str, Rows]) -> tuple[Index, Tensor]:
    """One row of bytes, and what is in it."""
    listed = [piece for piece in shard.pieces if piece.name in rows]
    rest = [gradient[piece.offset : piece.offset + piece.numel] for piece in shard.pieces if piece.name not in rows]
    numbers = [rows[piece.name].indices for piece in listed]
    values = [rows[piece.name].values for piece in listed]
    payload = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (*numbers, *rest, *values)])
    return tuple((piece.name, len(rows[piece.name].indices)) for piece in listed), payload


def unpack_rows(
    payload: Tensor, index: Index, shard: Shard, model: Model, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Rows]]:
    """Back from ``pack_rows``: the rest of the shard, and the rows by tensor. Views of the payload, which is bytes.

    Raises:
        WrongGradient: the index names what the shard does not hold, or the payload is not as long as it says.
    """
    held = {piece.name: piece for piece in shard.pieces}
    names = [name for name, _ in index]
    if len(set(names)) != len(names) or any(name not in held or not model[name].shape or n < 0 for name, n in index):
        raise WrongGradient(f"rows of {names} were pushed to shard {shard.number}, which holds {sorted(held)}")
    widths = {name: math.prod(model[name].shape[1:]) for name in names}
    item = dtype.itemsize
    rest = shard.numel - sum(held[name].numel for name in names)
    expected = sum(n * (8 + widths[name] * item) for name, n in index) + rest * item
    if payload.numel() != expected:
        raise WrongGradient(
            f"{list(index)} rows of shard {shard.number} are {expected} bytes, and {payload.numel()} came"
        )
    sizes = [n * 8 for _, n in index] + [rest * item] + [n * widths[name] * item for name, n in index]
    numbers, (dense,), values = _cut(payload, sizes, len(index))
    rows = {
        name: Rows(
            indices=number.clone().view(torch.int64),
            values=value.clone().view(dtype).view(count, *model[name].shape[1:]),
        )
        for (name, count), number, value in zip(index, numbers, values, strict=True)
    }
    return dense.clone().view(dtype), rows


def _cut(payload: Tensor, sizes: Sequence[int], count: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    ends = list(accumulate(sizes))
    parts = [payload[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return parts[:count], parts[count : count + 1], parts[count + 1 :]
