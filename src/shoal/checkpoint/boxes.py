"""Boxes in a tensor's index space: how pieces overlap, and whether they make up the whole exactly once. Pure, no torch.

A technique may cut a tensor along any dims, in several stretches, and a manifest may claim anything; so the proof that pieces
tile a tensor must be exact for every arrangement and cheap for a hostile one. It looks at corners only. The indicator of a box
is a signed sum of its corners' orthants (in one dim: [a, b) = [a, inf) - [b, inf)), and orthants are linearly independent, so
pieces cover every element exactly once if and only if their signed corners add up to the corners of the whole.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.core.placement import Shape

MAX_CORNERS = 2**20
"""Pieces times two to the number of cut dims; 2**18 pieces of a matrix cut both ways."""


@dataclass(frozen=True, order=True)
class Box:
    """A box of a whole tensor: the elements from ``start``, ``shape`` of them in each dim."""

    start: Shape
    shape: Shape

    @property
    def num_elements(self) -> int:
        """Elements in it."""
        return math.prod(self.shape)

    @property
    def stop(self) -> Shape:
        """The first index beyond it, in each dim."""
        return tuple(start + extent for start, extent in zip(self.start, self.shape, strict=True))

    def __str__(self) -> str:
        """``[0:4, 8:16]``, as one would index it."""
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(self.start, self.stop, strict=True)) + "]"


def whole_box(shape: Shape) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def intersect(first: Box, second: Box) -> Box | None:
    """What two boxes share; None when they share no element. Two boxes without dims share their one element."""
    start = tuple(max(pair) for pair in zip(first.start, second.start, strict=True))
    stop = tuple(min(pair) for pair in zip(first.stop, second.stop, strict=True))
    shape = tuple(high - low for low, high in zip(start, stop, strict=True))
    return Box(start, shape) if all(extent > 0 for extent in shape) else None


def contains(outer: Box, inner: Box) -> bool:
    """True when every element of ``inner`` is one of ``outer``."""
    low = all(a <= b for a, b in zip(outer.start, inner.start, strict=True))
    return low and all(a >= b for a, b in zip(outer.stop, inner.stop, strict=True))


def subtract(box: Box, other: Box) -> list[Box]:
    """Disjoint boxes that make up ``box`` without ``other``: at most two for each dim."""
    shared = intersect(box, other)
    if shared is None:
        return [box]
    rest = []
    start, stop = list(box.start), list(box.stop)
    for dim in range(len(start)):
        # Slabs before and after the shared part along this dim; what remains is within it, and goes on to the next dim.
        for low, high in ((start[dim], shared.start[dim]), (shared.stop[dim], stop[dim])):
            if low < high:
                corner = (*start[:dim], low, *start[dim + 1 :])
                end = (*stop[:dim], high, *stop[dim + 1 :])
                rest.append(Box(corner, tuple(b - a for a, b in zip(corner, end, strict=True))))
        start[dim], stop[dim] = shared.start[dim], shared.stop[dim]
    return rest


def describe_cut(shape: Shape, boxes: Sequence[Box]) -> str:
    """How a tensor is cut, in a few words: ``whole``, ``dim 0 in 4``, ``dim 0 in 4, dim 1 in 2``, else ``7 pieces``."""
    if len(boxes) == 1:
        return "whole"
    counts = [len({box.start[dim] for box in boxes}) for dim in range(len(shape))]
    if math.prod(counts) != len(boxes):
        return f"{len(boxes)} pieces"
    return ", ".join(f"dim {dim} in {count}" for dim, count in enumerate(counts) if count > 1)


def check_tiling(name: str, shape: Shape, boxes: Sequence[Box]) -> None:
    """Refuse boxes that are not the whole tensor cut up: nothing missing, nothing twice, nothing outside, nothing empty.

    Raises:
        ValueError: says which piece is wrong, or how many elements are covered and how many there are.
    """
    whole = whole_box(shape)
    for box in boxes:
        if len(box.start) != len(shape) or len(box.shape) != len(shape):
            raise ValueError(f"a piece of {name!r} has {len(box.start)} dims, the tensor has {len(shape)}")
        if not contains(whole, box):
            raise ValueError(f"one of the pieces of {name!r} is {box}, which is not inside {list(shape)}")
    if not whole.num_elements:
        if list(boxes) != [whole]:
            raise ValueError(f"the pieces of {name!r} are {len(boxes)}, and a tensor without elements is one piece")
        return
    covered = sum(box.num_elements for box in boxes)
    if covered != whole.num_elements:
        wrong = "leave gaps" if covered < whole.num_elements else "overlap"
        raise ValueError(
            f"the pieces of {name!r} {wrong}: they have {covered} elements, {list(shape)} has {whole.num_elements}"
        )
    if any(not box.num_elements for box in boxes):
        raise ValueError(f"one of the pieces of {name!r} has no elements")
    dims = [dim for dim, extent in enumerate(shape) if any(box.shape[dim] != extent for box in boxes)]
    if len(boxes) << len(dims) > MAX_CORNERS:
        raise ValueError(
            f"the pieces of {name!r} are {len(boxes)} cut along {len(dims)} dims, more than can be checked"
        )
    if _signed_corners(boxes, dims) != _signed_corners([whole], dims):
        raise ValueError(
            f"the pieces of {name!r} overlap and leave gaps: some elements of {list(shape)} are there twice"
        )


def _signed_corners(boxes: Iterable[Box], dims: Sequence[int]) -> dict[Shape, int]:
    """The corners of all boxes in ``dims``, each with its sum of signs; the ones that cancel out are left out."""
    sums: dict[Shape, int] = {}
    for box in boxes:
        start, shape = box.start, box.shape
        ends = [((start[dim], 1), (start[dim] + shape[dim], -1)) for dim in dims]
        for corner in itertools.product(*ends):
            point = tuple(index for index, _ in corner)
            total = sums.get(point, 0) + math.prod(sign for _, sign in corner)
            if total:
                sums[point] = total
            else:
                del sums[point]
    return sums
