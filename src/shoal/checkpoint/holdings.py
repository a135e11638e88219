"""What each rank holds of the tensors that are to be saved, and who writes which piece of them. Pure, no torch.

Tensor and ZeRO parallelism leave each rank with boxes of a whole tensor; replicas and the replicated parameters of tensor
parallelism leave several ranks with the same box, and shared heads even with boxes that overlap in part. The ranks tell each
other what they hold (``attempt.py``); from the same listings each of them works out the same division: disjoint boxes that make
up every tensor, each written by one rank that holds it, balanced by bytes.
"""

import heapq
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.checkpoint import strictjson
from shoal.checkpoint.boxes import Box, check_tiling, subtract, whole_box
from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.shard import ITEM_BYTES
from shoal.checkpoint.strictjson import check_object, mapping, shape_of, tensor_name
from shoal.core.placement import Placement, Shape

Unit = TypeVar("Unit", bound=Hashable)


def assign(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """The rank that writes each tensor, balanced by bytes.

    Largest first, each to the rank with the least so far (Graham, 1969: within 4/3 of the best balance). Equal loads go to the
    lower rank and equal sizes in the order of names, so the answer depends on nothing but the arguments.

    Args:
        sizes: bytes by tensor name.
        num_ranks: how many ranks hold the same tensors.
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners


def assign_held(sizes: Mapping[Unit, int], holders: Mapping[Unit, Sequence[int]], num_ranks: int) -> dict[Unit, int]:
    """The same when not every rank holds everything: each unit goes to one of its holders.

    What few ranks hold is dealt out first, because what many hold can still even out the loads.

    Args:
        sizes: bytes by unit; equal sizes are dealt out in the order of this mapping.
        holders: the ranks that hold each unit, ascending, at least one.
        num_ranks: how many ranks there are.
    """
    loads = [0] * num_ranks
    owners = {}
    for unit in sorted(sizes, key=lambda unit: (len(holders[unit]), -sizes[unit])):
        rank = min(holders[unit], key=lambda rank: (loads[rank], rank))
        owners[unit] = rank
        loads[rank] += sizes[unit]
    return owners


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank holds of one tensor."""

    dtype: str
    shape: Shape
    """Of the whole tensor."""
    boxes: tuple[Box, ...]
    """The parts of it that the rank holds, in its own order; none when it holds padding alone."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A tensor and one box of it: what is written under one key."""

    name: str
    shape: Shape
    """Of the whole tensor."""
    box: Box

    @property
    def key(self) -> str:
        """The key in a shard: the tensor's own name when the box is all of it."""
        return self.name if self.box == whole_box(self.shape) else f"{self.name}{self.box}"


Listing = Mapping[str, Holding]
"""What one rank holds, by tensor name."""


def hold(dtype: str, placement: Placement) -> Holding:
    """What a placement says that a rank holds."""
    boxes = tuple(Box(patch.whole_start, patch.shape) for patch in placement.patches if math.prod(patch.shape))
    if not math.prod(placement.whole_shape):
        boxes = (whole_box(placement.whole_shape),)
    return Holding(dtype=dtype, shape=placement.whole_shape, boxes=boxes)


def cuts_of(listing: Listing) -> list[Cut]:
    """Everything that a rank could write."""
    return [Cut(name=name, shape=held.shape, box=box) for name, held in listing.items() for box in held.boxes]


def encode_listing(listing: Listing) -> bytes:
    """The bytes in which a rank tells the others what it holds."""
    tree = {
        name: {
            "dtype": held.dtype,
            "shape": list(held.shape),
            "boxes": [[list(box.start), list(box.shape)] for box in held.boxes],
        }
        for name, held in listing.items()
    }
    return json.dumps(tree, separators=(",", ":")).encode()


def decode_listing(data: bytes) -> dict[str, Holding]:
    """What a rank holds.

    Raises:
        NotWhole: the bytes are not a listing.
    """
    try:
        return {tensor_name(name): _holding(name, tree) for name, tree in mapping("it", strictjson.parse(data)).items()}
    except (ValueError, KeyError, TypeError) as error:
        raise NotWhole(f"a rank's listing of what it holds: {error}") from error


def _holding(name: str, tree: Any) -> Holding:
    check_object(f"tensor {name!r}", tree, "dtype", "shape", "boxes")
    if tree["dtype"] not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has the type {str(tree['dtype'])[:80]!r}")
    boxes = tuple(Box(shape_of(name, start), shape_of(name, shape)) for start, shape in tree["boxes"])
    return Holding(dtype=tree["dtype"], shape=shape_of(name, tree["shape"]), boxes=boxes)


def divide(listings: Sequence[Listing]) -> list[list[Cut]]:
    """What each rank writes, so that together they write every element of every tensor once.

    Args:
        listings: of all ranks, by rank.

    Raises:
        NotWhole: ranks do not agree about a tensor, or no rank holds some of it.
    """
    sizes: dict[Cut, int] = {}
    holders: dict[Cut, tuple[int, ...]] = {}
    for name in sorted({name for listing in listings for name in listing}):
        held = [(rank, listing[name]) for rank, listing in enumerate(listings) if name in listing]
        first = held[0][1]
        for rank, other in held:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise NotWhole(
                    f"{name!r} is {first.dtype} {list(first.shape)} on rank {held[0][0]} "
                    f"and {other.dtype} {list(other.shape)} on rank {rank}"
                )
        parts = _disjoint(name, first.shape, [(rank, box) for rank, holding in held for box in holding.boxes])
        for box, ranks in parts.items():
            cut = Cut(name=name, shape=first.shape, box=box)
            sizes[cut], holders[cut] = ITEM_BYTES[first.dtype] * box.num_elements, ranks
    shares: list[list[Cut]] = [[] for _ in listings]
    for cut, rank in assign_held(sizes, holders, len(listings)).items():
        shares[rank].append(cut)
    return shares


def _disjoint(name: str, shape: Shape, held: Iterable[tuple[int, Box]]) -> dict[Box, tuple[int, ...]]:
    """Boxes that make up the tensor once, each with the ranks that hold it, in the order of their starts."""
    ranks: dict[Box, list[int]] = {}
    for rank, box in held:
        at = ranks.setdefault(box, [])
        if rank not in at:
            at.append(rank)
    parts = {box: tuple(ranks[box]) for box in sorted(ranks)}
    try:
        check_tiling(name, shape, list(parts))
    except ValueError:
        # Each against each, which is why it is done only for boxes that overlap in part.
        parts = _separate(parts)
        try:
            check_tiling(name, shape, list(parts))
        except ValueError as error:
            raise NotWhole(f"the ranks do not hold all of a tensor: {error}") from error
    return parts


def _separate(ranks: Mapping[Box, tuple[int, ...]]) -> dict[Box, tuple[int, ...]]:
    """Disjoint boxes that make up all of these."""
    parts: dict[Box, tuple[int, ...]] = {}
    # Boxes that are held by many come first and stay whole; of one that overlaps them in part only the rest is left.
    for box in sorted(ranks, key=lambda box: (-len(ranks[box]), box)):
        rest = [box]
        for other in parts:
            rest = [left for piece in rest for left in subtract(piece, other)]
        parts.update((piece, ranks[box]) for piece in rest)
    return dict(sorted(parts.items()))
