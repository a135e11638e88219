"""Weights out to the ranks of a worker, and their gradients back: whole on the leader, on every rank the part that it holds.

Placements say which boxes of a whole tensor a rank holds. At the start every rank tells the leader its own; from then on a
message is those boxes, one after the other, and nothing else. Of a gradient that several ranks hold alike, one of them speaks.

    leader's row     | a a a a | b b b b b b |                   whole tensors, as servers hold them
    to rank 1        | a a | b b b b b b |                       its boxes of a, and b whole
    from rank 1      | a a |                                     b is the leader's to speak for
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.full_tensor import box, is_spokesman
from shoal.core.errors import RunError
from shoal.core.placement import Patch, Placement
from shoal.engine.parallelize import ParallelModel
from shoal.serverrun.flatmodel import FlatRow

LEADER = 0
"""The rank of a group that is the worker to everyone else."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank of a group holds of the trained parameters, by name in the order of names."""

    placements: Mapping[str, Placement]
    spoken: frozenset[str]
    """Those whose gradient it brings."""

    @classmethod
    def of(cls, placed: ParallelModel) -> "Holding":
        """What this rank holds."""
        placements = dict(sorted(placed.reduction.placements.items()))
        spoken = [
            name
            for name in placements
            if is_spokesman(placed.mesh, is_split=name in placed.laid.placements, is_sharded=False)
            and placed.is_first_keeper(name)
        ]
        return cls(placements=placements, spoken=frozenset(spoken))

    def encode(self) -> Tensor:
        """As bytes."""
        entries = [
            [
                name,
                name in self.spoken,
                where.whole_shape,
                where.local_shape,
                [[patch.local_start, patch.whole_start, patch.shape] for patch in where.patches],
            ]
            for name, where in self.placements.items()
        ]
        return torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)

    @classmethod
    def decode(cls, encoded: Tensor) -> "Holding":
        """Back from ``encode``."""
        entries = json.loads(encoded.numpy().tobytes())
        placements = {
            name: Placement(
                whole_shape=tuple(whole),
                local_shape=tuple(local),
                patches=tuple(
                    Patch(local_start=tuple(start), whole_start=tuple(at), shape=tuple(shape))
                    for start, at, shape in patches
                ),
            )
            for name, _, whole, local, patches in entries
        }
        return cls(placements=placements, spoken=frozenset(name for name, speaks, *_ in entries if speaks))


class Dealing:
    """One rank's part in it. Every method is called by all ranks of the group together.

    Args:
        placed: this rank's model.
        dtype: of the trained parameters; a rank of a pipeline may hold none.
        row: whole weights and gradients; on the leader, None elsewhere.
    """

    def __init__(self, placed: ParallelModel, dtype: torch.dtype, row: FlatRow | None) -> None:
        self._channel = placed.mesh.everyone
        self._parameters = placed.reduction.updated
        self._own = Holding.of(placed)
        self._dtype = dtype
        holdings = _tell(self._channel, self._own)
        self._weights = row.whole(row.weights) if row is not None else {}
        self._gradient = row.whole(row.gradient) if row is not None else {}
        if row is not None:
            _check(holdings, {name: spec.shape for name, spec in row.model.items()})
        self._others = [
            holding if row is not None and rank != self._channel.rank else None for rank, holding in enumerate(holdings)
        ]
        """Of the other ranks, on the leader."""
        is_follower = row is None
        self._to = [self._room(holding, of_spoken=False) for holding in self._others]
        self._from = [self._room(holding, of_spoken=True) for holding in self._others]
        self._received = self._room(self._own if is_follower else None, of_spoken=False)
        self._sent = self._room(self._own if is_follower else None, of_spoken=True)

    @torch.no_grad()
    def deal(self) -> None:
        """Bring the weights of the leader's row into every rank's parameters."""
        nothing = self._room(None, of_spoken=False)
        if self._channel.rank == LEADER:
            for holding, message in zip(self._others, self._to, strict=True):
                if holding is not None:
                    for name, patch, place in _stretches(holding.placements):
                        whole = self._weights[name][box(patch.whole_start, patch.shape)]
                        message[place].view(patch.shape).copy_(whole)
            self._channel.all_to_all(self._to, [nothing] * self._channel.size)
            for name, patch, _ in _stretches(self._own.placements):
                local = self._parameters[name][box(patch.local_start, patch.shape)]
                local.copy_(self._weights[name][box(patch.whole_start, patch.shape)])
            return
        self._channel.all_to_all([nothing] * self._channel.size, self._from_leader(self._received, nothing))
        for name, patch, place in _stretches(self._own.placements):
            local = self._parameters[name][box(patch.local_start, patch.shape)]
            local.copy_(self._received[place].view(patch.shape))

    @torch.no_grad()
    def collect(self) -> None:
        """Bring every rank's gradients into the leader's row; what no sample touched is zero."""
        nothing = self._room(None, of_spoken=False)
        if self._channel.rank == LEADER:
            self._channel.all_to_all([nothing] * self._channel.size, self._from)
            for name, patch, _ in _stretches(_spoken(self._own)):
                self._put(name, patch, self._gradient[name][box(patch.whole_start, patch.shape)])
            for holding, message in zip(self._others, self._from, strict=True):
                if holding is not None:
                    for name, patch, place in _stretches(_spoken(holding)):
                        whole = self._gradient[name][box(patch.whole_start, patch.shape)]
                        whole.copy_(message[place].view(patch.shape))
            return
        for name, patch, place in _stretches(_spoken(self._own)):
            self._put(name, patch, self._sent[place].view(patch.shape))
        self._channel.all_to_all(self._from_leader(self._sent, nothing), [nothing] * self._channel.size)

    def _put(self, name: str, patch: Patch, where: Tensor) -> None:
        grad = self._parameters[name].grad
        if grad is None:
            where.zero_()
        else:
            where.copy_(grad[box(patch.local_start, patch.shape)])

    def _from_leader(self, message: Tensor, nothing: Tensor) -> list[Tensor]:
        """One message with the leader, and none with the others."""
        return [message if rank == LEADER else nothing for rank in range(self._channel.size)]

    def _room(self, holding: Holding | None, *, of_spoken: bool) -> Tensor:
        if holding is None:
            return torch.empty(0, dtype=self._dtype)
        placements = _spoken(holding) if of_spoken else holding.placements
        return torch.empty(sum(math.prod(patch.shape) for _, patch, _ in _stretches(placements)), dtype=self._dtype)


def _spoken(holding: Holding) -> dict[str, Placement]:
    return {name: where for name, where in holding.placements.items() if name in holding.spoken}


def _stretches(placements: Mapping[str, Placement]) -> Iterator[tuple[str, Patch, slice]]:
    """Every box of some tensors, and where it lies in a message."""
    at = 0
    for name, placement in placements.items():
        for patch in placement.patches:
            size = math.prod(patch.shape)
            yield name, patch, slice(at, at + size)
            at += size


def _tell(channel: Channel, own: Holding) -> list[Holding]:
    """What every rank of the group holds, by rank."""
    encoded = own.encode()
    sizes = torch.zeros(channel.size, dtype=torch.int64)
    channel.all_gather(torch.tensor([encoded.numel()]), sizes, [1] * channel.size)
    counts = [int(size) for size in sizes]
    whole = channel.all_gather(encoded, torch.empty(sum(counts), dtype=torch.uint8), counts)
    return [Holding.decode(part) for part in torch.split(whole, counts)]


def _check(holdings: Sequence[Holding], model: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a group that would leave a part of a gradient behind, or bring one twice.

    Raises:
        RunError: names the parameter.
    """
    brought = dict.fromkeys(model, 0)
    for holding in holdings:
        for name, patch, _ in _stretches(_spoken(holding)):
            brought[name] += math.prod(patch.shape)
    for name, shape in model.items():
        if brought[name] != math.prod(shape):
            raise RunError(
                f"the ranks of this worker bring {brought[name]} of the {math.prod(shape)} elements of {name!r}'s gradient"
            )
