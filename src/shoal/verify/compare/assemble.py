"""What the ranks recorded, put together: whole tensors from their pieces, and copies that should be equal and are not.

A tensor that several ranks hold is taken from the lowest of them. Every other copy is compared with it bit for bit: replicas that
drift apart are wrong even while the one that is looked at is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.comm.full_tensor import box, put_local
from shoal.core.placement import Placement, place_whole
from shoal.verify.reference.recording import Recording, Step, read_placement


@dataclass(frozen=True, kw_only=True)
class RankPiece:
    """What one rank holds of one tensor."""

    rank: int
    local: Tensor
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class AssembledStep:
    """One step of all ranks."""

    step: Step
    """With whole tensors."""
    pieces: Mapping[str, tuple[RankPiece, ...]]
    disagreeing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By tensor, the ranks whose copy is not the lowest rank's."""


def assemble_step(recordings: Sequence[Recording], index: int) -> AssembledStep:
    """Put one step together.

    Args:
        recordings: of all ranks, in their order.
        index: the step, counted from 0.
    """
    steps = [recording.step(index) for recording in recordings]
    tables = [recording.facts["placements"] for recording in recordings]
    pieces: dict[str, list[RankPiece]] = {}
    for rank, (step, table) in enumerate(zip(steps, tables, strict=True)):
        for key, local in step.tensors.items():
            pieces.setdefault(key, []).append(
                RankPiece(rank=rank, local=local, placement=placement_of(key, local, table))
            )
    wholes, disagreeing = assemble(pieces)
    first = steps[0]
    for rank, step in enumerate(steps[1:], start=1):
        # The same on every rank, or the ranks would decide differently about clipping and skipping.
        if (step.loss, step.norm, step.skipped) != (first.loss, first.norm, first.skipped):
            disagreeing["loss" if step.loss != first.loss else "norm"] = (rank,)
    whole = Step(loss=first.loss, norm=first.norm, skipped=first.skipped, tensors=wholes)
    return AssembledStep(
        step=whole, pieces={key: tuple(found) for key, found in pieces.items()}, disagreeing=disagreeing
    )


def assemble(pieces: Mapping[str, Sequence[RankPiece]]) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Whole tensors by name; and of each that has copies which are not the lowest rank's, the ranks that hold them."""
    wholes = {key: _assemble(found) for key, found in pieces.items()}
    return wholes, {key: ranks for key, found in pieces.items() if (ranks := _unlike(wholes[key], found))}


def placement_of(key: str, local: Tensor, table: Mapping[str, Mapping[str, object]]) -> Placement:
    """Where a captured tensor lies: optimizer state lies where its parameter does, step counts and buffers are whole."""
    if key in table:
        # What compressed sums remember together is cut otherwise than its parameter.
        return read_placement(table[key])
    kind, _, name = key.partition("/")
    if kind == "optimizer":
        name = name.rpartition("/")[0]
    if kind == "buffer" or name not in table:
        return place_whole(local.shape)
    placement = read_placement(table[name])
    return placement if tuple(local.shape) == placement.local_shape else place_whole(local.shape)


def _assemble(pieces: Sequence[RankPiece]) -> Tensor:
    shape, dtype = pieces[0].placement.whole_shape, pieces[0].local.dtype
    # NaN where no rank holds anything: a hole must not look like a value.
    whole = torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype)
    for piece in reversed(pieces):
        put_local(piece.local, whole, piece.placement)
    return whole


def _unlike(whole: Tensor, pieces: Sequence[RankPiece]) -> tuple[int, ...]:
    return tuple(
        piece.rank
        for piece in pieces
        if any(
            not torch.equal(
                whole[box(patch.whole_start, patch.shape)], piece.local[box(patch.local_start, patch.shape)]
            )
            for patch in piece.placement.patches
        )
    )
