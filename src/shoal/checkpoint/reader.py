"""Reading a checkpoint into tensors: local tensors are filled from the pieces of any saved plan.

Only bytes whose sums were checked become tensors, and no code is run by any of them.

Where a saved piece and a wanted patch overlap, elements *move*. A move is planned in numbers first; then each shard is read once,
front to back, only the chunks that hold something wanted, and a piece's bytes are given up as soon as they are in place. So
memory is what the rank is going to hold, a chunk, and the piece that is being read; never the whole tensors.

``torch.distributed.checkpoint`` plans the same with metadata that it pickles, and its storage reads whole files for a slice.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.boxes import Box, intersect
from shoal.checkpoint.files import NotWhole, folder
from shoal.checkpoint.manifest import Manifest, Piece, TensorEntry
from shoal.checkpoint.pieces import from_bytes, region, strided, zeros
from shoal.checkpoint.shard import ITEM_BYTES, Span, read_spans
from shoal.checkpoint.whole import Found, newest_whole, read_manifest, verify
from shoal.core.errors import RunError
from shoal.core.placement import Placement, Shape, place_whole


@dataclass(frozen=True, kw_only=True)
class _Move:
    """Elements of a saved piece that belong into a local tensor."""

    name: str
    shape: Shape
    first: int
    """The first of them, in elements from the piece's first."""
    strides: Shape
    """Of the piece, in elements."""
    local_start: Shape

    @property
    def stop(self) -> int:
        """One beyond the last of them."""
        steps = ((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return self.first + sum(steps) + 1


ReadSpans = Callable[[str, Mapping[Span, list[_Move]]], Iterable[tuple[Span, bytearray]]]
"""Reads the bytes of parts of a file's tensors, one after the other."""


def fill(
    folder_fd: int, manifest: Manifest, placements: Mapping[str, Placement], *, check_all: bool
) -> dict[str, Tensor]:
    """The local tensors of ``placements``, in its order; what no patch covers is zero.

    Args:
        folder_fd: the checkpoint's folder.
        manifest: what lies in it; every name and whole shape of ``placements`` is in there.
        placements: what to make, by tensor name.
        check_all: check every chunk of every file.

    Raises:
        NotWhole: names the file and what does not agree.
    """
    layouts = manifest.layouts()

    def read(file: str, spans: Mapping[Span, list[_Move]]) -> Iterator[tuple[Span, bytearray]]:
        return read_spans(folder_fd, file, manifest.files[file], layouts[file], spans=spans, check_all=check_all)

    return fill_from(manifest.tensors, placements, read, files=manifest.files if check_all else None)


def fill_from(
    tensors: Mapping[str, TensorEntry],
    placements: Mapping[str, Placement],
    read: ReadSpans,
    *,
    files: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """The local tensors of ``placements`` out of any files, in its order; what no patch covers is zero.

    Args:
        tensors: what lies where; every name and whole shape of ``placements`` is in there.
        placements: what to make, by tensor name.
        read: gives the bytes of parts of a file's tensors.
        files: those to go through, also where they have nothing that is wanted; left out, the ones that have.
    """
    plan = _plan(tensors, placements)
    found: dict[str, Tensor] = {}
    for file in plan if files is None else files:
        spans = plan.get(file, {})
        for span, data in read(file, spans):
            for move in spans[span]:
                _put(found, move, span, data, tensors[move.name].dtype, placements[move.name])
    rest = ((name, placement) for name, placement in placements.items() if name not in found)
    found.update({name: zeros(tensors[name].dtype, placement.local_shape) for name, placement in rest})
    return {name: found[name] for name in placements}


def _put(found: dict[str, Tensor], move: _Move, span: Span, data: bytearray, dtype: str, placement: Placement) -> None:
    item = ITEM_BYTES[dtype]
    if len(data) == item * math.prod(move.shape) and move.shape == placement.local_shape:
        # The bytes just read are the local tensor: no copy, and no second time its memory.
        found[move.name] = from_bytes(data, dtype, move.shape)
        return
    if move.name not in found:
        found[move.name] = zeros(dtype, placement.local_shape)
    moved = strided(data, dtype, move.shape, move.strides, move.first - span.start // item)
    found[move.name][region(move.local_start, move.shape)] = moved


def _plan(
    tensors: Mapping[str, TensorEntry], placements: Mapping[str, Placement]
) -> dict[str, dict[Span, list[_Move]]]:
    """What to read, by file: the parts of its tensors, and what moves out of each."""
    moves: dict[tuple[str, str], list[_Move]] = {}
    for name, placement in placements.items():
        for piece, move in _moves(name, tensors[name], placement):
            moves.setdefault((piece.file, piece.key), []).append(move)
    plan: dict[str, dict[Span, list[_Move]]] = {}
    for (file, key), of_piece in moves.items():
        item = ITEM_BYTES[tensors[of_piece[0].name].dtype]
        for first, stop, together in _runs(of_piece):
            plan.setdefault(file, {})[Span(key=key, start=first * item, end=stop * item)] = together
    return plan


def _moves(name: str, tensor: TensorEntry, placement: Placement) -> Iterator[tuple[Piece, _Move]]:
    for patch in placement.patches:
        wanted = Box(patch.whole_start, patch.shape)
        for piece in tensor.pieces:
            shared = intersect(piece.box, wanted)
            if shared is None:
                continue
            strides = _strides(piece.shape)
            in_piece = (low - origin for low, origin in zip(shared.start, piece.start, strict=True))
            in_patch = (low - origin for low, origin in zip(shared.start, patch.whole_start, strict=True))
            yield (
                piece,
                _Move(
                    name=name,
                    shape=shared.shape,
                    first=sum(index * stride for index, stride in zip(in_piece, strides, strict=True)),
                    strides=strides,
                    local_start=tuple(local + by for local, by in zip(patch.local_start, in_patch, strict=True)),
                ),
            )


def _runs(moves: list[_Move]) -> Iterator[tuple[int, int, list[_Move]]]:
    """Moves whose elements lie among each other are read together: columns of a matrix, or one of three fused ones."""
    ordered = sorted(moves, key=lambda move: move.first)
    first, stop, together = ordered[0].first, ordered[0].stop, [ordered[0]]
    for move in ordered[1:]:
        if move.first < stop:
            stop = max(stop, move.stop)
            together.append(move)
        else:
            yield first, stop, together
            first, stop, together = move.first, move.stop, [move]
    yield first, stop, together


def _strides(shape: Shape) -> Shape:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


__all__ = ["Checkpoint", "Found", "newest_whole", "read", "read_local", "verify"]

_MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory."""

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    manifest: Manifest


def read(path: Path, *, wanted: Callable[[str], bool] | None = None, expect: str | None = None) -> Checkpoint:
    """Load a checkpoint, every tensor whole, however it was cut.

    Args:
        path: its folder.
        wanted: which tensors to load, by name; all of them when left out. Files are read and checked only where wanted ones lie.
        expect: what ``hash_manifest`` must say of it; None for any.

    Raises:
        NotWhole: names the checkpoint, the file and what does not agree.
        RequestError: there is no such folder.
    """
    try:
        with folder(path) as folder_fd:
            manifest = read_manifest(folder_fd, path, expect=expect)
            chosen = {
                name: place_whole(tensor.shape)
                for name, tensor in manifest.tensors.items()
                if wanted is None or wanted(name)
            }
            tensors = fill(folder_fd, manifest, chosen, check_all=wanted is None)
    except NotWhole as error:
        raise NotWhole(f"checkpoint {path} is not whole: {error}") from error
    return Checkpoint(step=manifest.step, tensors=tensors, values=manifest.values, manifest=manifest)


def read_local(path: Path, placements: Mapping[str, Placement], *, expect: str | None = None) -> dict[str, Tensor]:
    """Load what one rank holds of a checkpoint that was saved under any plan.

    Only chunks that hold some of it are read and checked, and no tensor is ever whole in memory unless the rank holds it whole.

    Args:
        path: the checkpoint's folder.
        placements: which part of which tensor the rank holds, by name; names that are left out are not read.
        expect: what ``hash_manifest`` must say of it; None for any.

    Returns:
        The local tensors on the CPU, in the type they were saved in; what no patch covers is zero.

    Raises:
        NotWhole: names the checkpoint, the file and what does not agree.
        RequestError: there is no such folder.
        RunError: the checkpoint lacks some of these tensors, or has them in other shapes; names them.
    """
    try:
        with folder(path) as folder_fd:
            manifest = read_manifest(folder_fd, path, expect=expect)
            _check_fit(path, manifest, placements)
            return fill(folder_fd, manifest, placements, check_all=False)
    except NotWhole as error:
        raise NotWhole(f"checkpoint {path} is not whole: {error}") from error


def _check_fit(path: Path, manifest: Manifest, placements: Mapping[str, Placement]) -> None:
    missing = [repr(name) for name in placements if name not in manifest.tensors]
    if missing:
        raise RunError(f"checkpoint {path} has {len(manifest.tensors)} tensors and lacks {_some(missing)}")
    shapes = ((name, manifest.tensors[name].shape, placement) for name, placement in placements.items())
    others = [
        f"{name!r}: saved as {list(saved)}, wanted as {list(placement.whole_shape)}"
        for name, saved, placement in shapes
        if saved != tuple(placement.whole_shape)
    ]
    if others:
        raise RunError(f"checkpoint {path} has tensors of other shapes: {_some(others)}")


def _some(named: Sequence[str]) -> str:
    left = len(named) - _MAX_NAMED
    return ", ".join(named[:_MAX_NAMED]) + (f" and {left} more" if left > 0 else "")
