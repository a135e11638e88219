"""Gradients of weights that several ranks hold: tied ones, the two copies of a bidirectional schedule, stages of several ranks.

Each use of a weight, and each copy of a stage (a direction, or a rank that takes turns), has a sum over microbatches of its
own; these are added in the order of copies, then of stages. The order is the same wherever the stages lie, so every rank that
holds the weight gets the same bits under every schedule. A weight that no copy has touched keeps no gradient, as in one
process: an optimizer skips it, and would decay it if it had zeros.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.pipeline.p2p import Endpoint, Message, PointToPoint, TensorMeta
from shoal.schedules.schedule import Grid

SHARE = "share"
"""The ledger's word for what is sent here: it comes after the last cell, and not with every microbatch."""
_TAG = 1 << 20
"""Above every stage's endpoints."""
Place = tuple[int, int, int]
"""Which copy of the stage (of two directions 0 is down and 1 up), the stage, and the rank where they are."""


class SharedGradients:
    """One rank's part in it.

    Args:
        parameters: this rank's, by name.
        stages: that hold each parameter.
        grid: where stages lie.
        rank: this one.
        p2p: to the others; None when there are none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stages: Mapping[str, frozenset[int]],
        *,
        grid: Grid,
        rank: int,
        p2p: PointToPoint | None,
    ) -> None:
        self._rank, self._p2p = rank, p2p
        places = {name: places_of(grid, stages[name]) for name in sorted(parameters)}
        self._places = {name: found for name, found in places.items() if len(found) > 1}
        self._parameters = {name: parameters[name] for name in self._places}
        self._sums: dict[tuple[str, int], Tensor | None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that are summed here."""
        return tuple(self._places)

    def forget(self) -> None:
        """Drop what a step has summed so far."""
        self._sums.clear()

    @contextmanager
    def stage(self, stage: int) -> Iterator[None]:
        """Surrounds a backward pass of a stage: what it adds is added to that stage's own sum."""
        held = [name for name, places in self._places.items() if self._is_here(places, stage)]
        for name in held:
            self._parameters[name].grad = self._sums.pop((name, stage), None)
        try:
            yield
        finally:
            for name in held:
                self._sums[name, stage], self._parameters[name].grad = self._parameters[name].grad, None

    def finish(self) -> None:
        """Add up what the stages have, here and on the other ranks; the totals are left in ``.grad``."""
        arrived = self._exchange()
        for name, places in self._places.items():
            total: Tensor | None = None
            for _, stage, rank in places:
                part = (self._sums if rank == self._rank else arrived[rank]).get((name, stage))
                if part is not None:
                    total = part if total is None else total + part
            self._parameters[name].grad = total
        self._sums.clear()

    def _exchange(self) -> dict[int, dict[tuple[str, int], Tensor | None]]:
        """Every other holder's sums, one message each way: the sums, then a number for each that says whether there is one."""
        peers = sorted({rank for places in self._places.values() for *_, rank in places if rank != self._rank})
        arrived: dict[int, dict[tuple[str, int], Tensor | None]] = {}
        if not peers:
            return arrived
        assert self._p2p is not None
        # All receives are posted before anything is sent: every holder sends to every other at the same time.
        messages = {peer: self._expect(peer, self._p2p) for peer in peers}
        for peer in peers:
            packed = self._pack(self._common(peer, of=self._rank))
            self._p2p.send([packed], Endpoint(peer, _TAG), "shared", called=SHARE)
        for peer, message in messages.items():
            (packed,), _ = message.open()
            keys = self._common(peer, of=peer)
            *parts, there = torch.split(packed, [self._parameters[name].numel() for name, _ in keys] + [len(keys)])
            arrived[peer] = {
                key: part.view_as(self._parameters[key[0]]) if is_there else None
                for key, part, is_there in zip(keys, parts, there.tolist(), strict=True)
            }
        self._p2p.flush()
        return arrived

    def _expect(self, peer: int, p2p: PointToPoint) -> Message:
        held = [self._parameters[name] for name, _ in self._common(peer, of=peer)]
        size = sum(parameter.numel() + 1 for parameter in held)
        endpoint = Endpoint(peer, _TAG)
        p2p.agree(endpoint, "shared", (TensorMeta((size,), held[0].dtype, False),))
        return p2p.expect(endpoint, "shared")

    def _common(self, peer: int, *, of: int) -> list[tuple[str, int]]:
        """The sums of one of two ranks that the other wants, in an order that both know."""
        return [
            (name, stage)
            for name, places in self._places.items()
            if {peer, self._rank} <= {rank for *_, rank in places}
            for _, stage, rank in places
            if rank == of
        ]

    def _is_here(self, places: tuple[Place, ...], stage: int) -> bool:
        return any(place[1:] == (stage, self._rank) for place in places)

    def _pack(self, keys: Sequence[tuple[str, int]]) -> Tensor:
        own = [self._sums.get(key) for key in keys]
        parts = [
            torch.zeros_like(self._parameters[name]) if part is None else part
            for (name, _), part in zip(keys, own, strict=True)
        ]
        there = parts[0].new_tensor([part is not None for part in own])
        return torch.cat([*(part.reshape(-1) for part in parts), there])


def places_of(grid: Grid, stages: frozenset[int]) -> tuple[Place, ...]:
    """Where some stages are, in the order in which their sums are added."""
    ranks = {stage: grid.ranks_of(stage) for stage in sorted(stages)}
    return tuple(
        (copy, stage, own[copy])
        for copy in range(max(map(len, ranks.values()), default=0))
        for stage, own in ranks.items()
        if copy < len(own)
    )
