"""Changes of which ZeRO gives a rank some rows, widened to the whole blocks of a codec, so that the cut changes no bit.

    parameter      | block 0 | block 1 | block 2 | block 3 |
    rank 0 holds   |..............|                              sends blocks 0 and 1
    rank 1 holds                  |........................|     sends blocks 1, 2 and 3

A codec's scale is of a whole block. Before a round the ranks of an island give each other the few elements of blocks that a cut
divides; both then code the same block, sum it with the other islands, and each takes what it holds of the result. What the codec
loses in such a block is kept by both, alike.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import Traffic, TrafficCounts
from shoal.compression.layout import whole_blocks
from shoal.core.placement import Placement

Slices = list[tuple[str, int, int]]
"""Elements of parameters: name, first element and end, counted in the whole parameter."""


class WholeBlocks:
    """What one rank of an island and its neighbours give each other before a round.

    Args:
        placements: where what this rank holds lies in each parameter; ZeRO cuts rows.
        coded: the parameters that go through a codec; others are never widened.
        order: the names of all trained parameters of the model, the same on all ranks.
        block: of the codec, in elements.
        channel: the ranks of this island that hold parts of the same parameters.
    """

    def __init__(
        self,
        placements: Mapping[str, Placement],
        coded: frozenset[str],
        *,
        order: Sequence[str],
        block: int,
        channel: Channel,
    ) -> None:
        self._channel = channel
        shapes = {name: place.whole_shape for name, place in placements.items()}
        own = {name: held_elements(place) for name, place in placements.items()}
        held = self._tell(own, order)
        coding = [
            {name: whole_blocks(shapes[name], *one[name], block if name in coded else 1) for name in one}
            for one in held
        ]
        self.parts = coding[channel.rank]
        """What this rank codes of each parameter."""
        wide = [{name: (part.offset, part.offset + part.size) for name, part in one.items()} for one in coding]
        self._sent = [self._missing(own, held[rank], wide[rank]) for rank in range(channel.size)]
        """What each rank needs of what this one holds."""
        self._received = [self._missing(held[rank], own, wide[channel.rank]) for rank in range(channel.size)]
        """What this rank needs of what each holds."""
        self._is_cut = any(
            self._missing(held[one], held[other], wide[other])
            for one in range(channel.size)
            for other in range(channel.size)
        )
        """Some block is divided, somewhere: the ranks exchange all together, or not at all."""

    def _tell(self, own: Mapping[str, tuple[int, int]], order: Sequence[str]) -> list[dict[str, tuple[int, int]]]:
        """What every rank holds of this rank's parameters, by rank. All ranks of the channel call it together."""
        table = torch.tensor([own.get(name, (0, 0)) for name in order], dtype=torch.int64)
        size = self._channel.size
        told = table.new_empty(size * table.numel())
        self._channel.all_gather(table.view(-1), told, [table.numel()] * size)
        return [
            {name: (first, end) for name, (first, end) in zip(order, rows.tolist(), strict=True) if name in own}
            for rows in told.view(size, len(order), 2)
        ]

    @staticmethod
    def _missing(
        held: Mapping[str, tuple[int, int]], own: Mapping[str, tuple[int, int]], wide: Mapping[str, tuple[int, int]]
    ) -> Slices:
        """What a rank that holds ``own`` and codes ``wide`` lacks, of what another holds."""
        found: Slices = []
        for name in sorted(wide):
            first, end = own[name]
            for start, stop in ((wide[name][0], first), (end, wide[name][1])):
                start, stop = max(start, held[name][0]), min(stop, held[name][1])
                if first < end and start < stop:
                    found.append((name, start, stop))
        return found

    @torch.no_grad()
    def widen(self, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Flat tensors of what this rank codes: a change's own memory where nothing is added. All ranks call it together."""
        found: dict[str, Tensor] = {}
        for name, change in changes.items():
            part, flat = self.parts[name], change.view(-1)
            found[name] = flat if part.size == flat.numel() else flat.new_empty(part.size)
            if part.size != flat.numel():
                found[name][part.before : part.before + flat.numel()] = flat
        self.refresh_(found)
        return found

    @torch.no_grad()
    def refresh_(self, flats: Mapping[str, Tensor]) -> None:
        """Take anew what other ranks hold of widened tensors, some of which may be left out. All ranks call it together."""
        if not self._is_cut:
            return
        like = next(iter(flats.values()), torch.empty(0))
        sent = [_joined(self._views(flats, one), like) for one in self._sent]
        targets = [list(self._views(flats, one)) for one in self._received]
        received = [like.new_empty(sum(view.numel() for view in views)) for views in targets]
        self._channel.all_to_all(sent, received)
        for views, message in zip(targets, received, strict=True):
            for view, part in zip(views, torch.split(message, [view.numel() for view in views]), strict=True):
                view.copy_(part)

    def _views(self, flats: Mapping[str, Tensor], slices: Slices) -> Iterator[Tensor]:
        for name, start, stop in slices:
            if name in flats:
                offset = self.parts[name].offset
                yield flats[name][start - offset : stop - offset]

    @torch.no_grad()
    def narrow_(self, flats: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
        """Put what this rank holds of widened tensors back into its changes."""
        for name, change in changes.items():
            if flats[name].data_ptr() != change.data_ptr():
                change.copy_(self.parts[name].own(flats[name]).view_as(change))

    def forecast_traffic(self, names: Collection[str] | None = None) -> TrafficCounts:
        """What widening these parameters, or all, moves."""
        if not self._is_cut:
            return {}
        wanted = set(self.parts if names is None else names)
        elements = sum(stop - start for one in self._sent for name, start, stop in one if name in wanted)
        return {(self._channel.axis, "all_to_all"): Traffic(calls=1, num_bytes=4 * elements)}


def held_elements(place: Placement) -> tuple[int, int]:
    """The first element and the end of whole rows that a placement holds of a parameter."""
    if not place.patches:
        return 0, 0
    (patch,) = place.patches
    row = math.prod(place.whole_shape[1:])
    first = patch.whole_start[0] * row if place.whole_shape else 0
    return first, first + math.prod(patch.shape)


def _joined(views: Iterator[Tensor], like: Tensor) -> Tensor:
    found = list(views)
    return torch.cat(found) if found else like.new_empty(0)
