"""The pattern of a difference, in words: a factor of an axis size, one shard, one replica, some rows, everything.

The pattern is the bug: a gradient that is twice too large under ``cp=2`` was summed once too often, one that is wrong on the
second shard only was cut in the wrong place. Everything here is a pure function of tensors and coordinates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.full_tensor import take_local
from shoal.verify.compare.assemble import RankPiece

# A factor explains a difference when what it leaves is this small a part of it.
_EXPLAINED = 0.02
_NEAR = 0.02


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Where the ranks stand."""

    degrees: Mapping[str, int]
    """Ranks along each axis, by name; ``microbatches`` too, since accumulation is a sum like the others."""
    coordinates: Sequence[Mapping[str, int]]
    """By rank."""
    names: Sequence[str] = ()
    """What each of them is called, where it is no rank."""

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """The coordinate that these ranks and no others share, such as ``tp coordinate 1``; else their numbers."""
        others = [rank for rank in range(len(self.coordinates)) if rank not in ranks]
        for axis, degree in self.degrees.items():
            if degree < 2 or axis == "microbatches":
                continue
            places = {self.coordinates[rank][axis] for rank in ranks}
            if len(places) == 1 and not places & {self.coordinates[rank][axis] for rank in others}:
                return f"{axis} coordinate {places.pop()} ({self.name_ranks(ranks)})"
        return self.name_ranks(ranks)

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """What these are called."""
        if self.names:
            return ", ".join(self.names[rank] for rank in ranks)
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def find_factor(reference: Tensor, found: Tensor) -> float | None:
    """The number that ``found`` is ``reference`` times; None when it is not a multiple."""
    ref, own = reference.double().reshape(-1), found.double().reshape(-1)
    square = float(ref.dot(ref))
    if square == 0.0 or not bool(torch.isfinite(own).all()):
        return None
    factor = float(own.dot(ref)) / square
    left = float((own - factor * ref).norm())
    if abs(factor - 1.0) < 1e-9 or left > _EXPLAINED * float((own - ref).norm()):
        return None
    return factor


def name_factor(factor: float, degrees: Mapping[str, int]) -> str | None:
    """The axes whose size, its inverse or its square the factor is, such as ``dp or tp``; None when there is none."""
    for exponent, words in ((1, "the size of"), (-1, "one over the size of"), (2, "the square of the size of")):
        axes = [
            axis
            for axis, degree in degrees.items()
            if degree > 1 and abs(factor / float(degree) ** exponent - 1.0) < _NEAR
        ]
        if axes:
            return f"{words} {' or '.join(axes)}"
    return None


def describe_number(reference: float, found: float, layout: RankGrid) -> str:
    """The pattern of a loss or a norm."""
    if not math.isfinite(found):
        return "it is not finite"
    if reference == 0.0:
        return "the reference is zero"
    factor = found / reference
    named = name_factor(factor, layout.degrees)
    return f"a factor of {factor:.6g}, {named}" if named else f"{factor:.6g} times the reference, no factor of an axis"


def describe_tensor(reference: Tensor, found: Tensor, pieces: Sequence[RankPiece], layout: RankGrid) -> str:
    """The pattern of one tensor: factor, then shard or replica, then rows."""
    if not bool(torch.isfinite(found).all()):
        return "it is not finite, or no rank holds a part of it"
    if not found.count_nonzero() and reference.count_nonzero():
        return "it is zero"
    whole_factor = find_factor(reference, found)
    ranks = describe_shares(reference, pieces, layout)
    if whole_factor is not None:
        named = name_factor(whole_factor, layout.degrees)
        text = f"a factor of {whole_factor:.6g}" + (f", {named}" if named else "")
        return f"{text}; {ranks}" if ranks else text
    if ranks:
        return ranks
    rows = describe_rows(reference, found)
    return rows or "all of it, by no common factor"


def describe_shares(reference: Tensor, pieces: Sequence[RankPiece], layout: RankGrid) -> str | None:
    """Which ranks hold something wrong, when it is not all of them: a shard, or a copy of one."""
    if len(pieces) < 2:
        return None
    parts = [take_local(reference, piece.placement) for piece in pieces]
    wrong = [index for index, piece in enumerate(pieces) if _is_off(parts[index], piece.local)]
    if len(wrong) == len(pieces):
        source = _foreign_source(reference, pieces, 0)
        if source is not None:
            first, other = layout.name_ranks([pieces[0].rank]), layout.name_ranks([source])
            return f"every shard holds the values of another: {first} those of {other}"
        return _describe_own_values(pieces, layout)
    if not wrong:
        return None
    ranks = [pieces[index].rank for index in wrong]
    right = {pieces[index].placement for index in range(len(pieces)) if index not in wrong}
    where = layout.describe_ranks(ranks)
    is_copy = all(pieces[index].placement in right for index in wrong)
    source = None if is_copy else _foreign_source(reference, pieces, wrong[0])
    text = f"one replica only: {where}" if is_copy else f"one shard only: {where}"
    return f"{text}, which holds the values of {layout.name_ranks([source])}'s shard" if source is not None else text


def describe_rows(reference: Tensor, found: Tensor) -> str | None:
    """The rows (dim 0) that are wrong, when they are one range and not all."""
    if reference.ndim == 0 or reference.shape[0] < 2:
        return None
    apart = (found.double() - reference.double()).reshape(reference.shape[0], -1).norm(dim=1)
    size = reference.double().reshape(reference.shape[0], -1).norm(dim=1)
    # A thousandth of the worst row: what is below it is the echo of the rest, not the bug.
    wrong = (apart > 1e-3 * float(apart.max())) & (apart > 1e-6 * size)
    places = wrong.nonzero().reshape(-1).tolist()
    num_rows = reference.shape[0]
    if not places or len(places) == num_rows:
        return None
    first, last = places[0], places[-1]
    if last - first + 1 != len(places):
        return f"{len(places)} of {num_rows} rows"
    if last == num_rows - 1:
        return f"only the last {len(places)} of {num_rows} rows"
    return f"only rows {first} to {last} of {num_rows}"


def describe_spread(names: Sequence[str], wrong: Sequence[str], shapes: Mapping[str, int]) -> str:
    """How many tensors of the kind are wrong at this step, and what they have in common."""
    if len(wrong) == len(names) and len(names) > 1:
        return "every tensor"
    if len(wrong) == 1:
        return "this tensor only"
    flat = all(shapes.get(name, 2) <= 1 for name in wrong)
    common = "; all have one dim (norms and biases)" if flat and len(wrong) > 1 else ""
    return f"{len(wrong)} of {len(names)} tensors{common}"


def _describe_own_values(pieces: Sequence[RankPiece], layout: RankGrid) -> str | None:
    """When ranks that hold the same piece have different values: along which axis they were not brought together."""
    groups: dict[object, list[RankPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.placement, []).append(piece)
    unlike = [
        (group[0], other)
        for group in groups.values()
        for other in group[1:]
        if not torch.equal(group[0].local, other.local)
    ]
    if not unlike:
        return None
    for axis, degree in layout.degrees.items():
        if degree > 1 and axis != "microbatches" and all(_differ_along(layout, a, b, axis) for a, b in unlike):
            return f"ranks along {axis} hold different values of the same piece, none of them right: not summed over {axis}"
    return "ranks hold different values of the same piece, none of them right"


def _differ_along(layout: RankGrid, one: RankPiece, other: RankPiece, axis: str) -> bool:
    return layout.coordinates[one.rank][axis] != layout.coordinates[other.rank][axis]


def _foreign_source(reference: Tensor, pieces: Sequence[RankPiece], wrong: int) -> int | None:
    """The rank whose right values a wrong piece holds."""
    local = pieces[wrong].local
    for index, piece in enumerate(pieces):
        if index != wrong and piece.placement.local_shape == pieces[wrong].placement.local_shape:
            theirs = take_local(reference, piece.placement)
            if not _is_off(theirs, local) and not torch.equal(theirs, take_local(reference, pieces[wrong].placement)):
                return piece.rank
    return None


def _is_off(reference: Tensor, found: Tensor) -> bool:
    """Clearly wrong, whatever the arithmetic: patterns are sought only once something is."""
    apart, size = float((found.double() - reference.double()).norm()), float(reference.double().norm())
    return not apart <= 1e-4 * size
