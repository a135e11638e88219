"""Reading a checkpoint into tensors. Only bytes whose sums were checked become tensors, and no code is run by any of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.files import NotWhole, folder
from shoal.checkpoint.manifest import Manifest, TensorEntry
from shoal.checkpoint.shard import read_shard
from shoal.checkpoint.tensors import empty, from_bytes
from shoal.checkpoint.whole import Found, newest_whole, read_manifest, verify

__all__ = ["Checkpoint", "Found", "newest_whole", "read", "verify"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory."""

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    manifest: Manifest


def read(path: Path, *, wanted: Callable[[str], bool] | None = None) -> Checkpoint:
    """Load a checkpoint.

    Args:
        path: its folder. wanted: which tensors to load, by name; all of them when left out. Files are read and checked only
        where wanted ones lie.

    Raises:
        NotWhole: names the checkpoint, the file and what does not agree.
        RequestError: there is no such folder.
    """
    try:
        with folder(path) as folder_fd:
            manifest = read_manifest(folder_fd, path)
            chosen = {name: tensor for name, tensor in manifest.tensors.items() if wanted is None or wanted(name)}
            pieces = _read_pieces(folder_fd, manifest, chosen, check_all=wanted is None)
    except NotWhole as error:
        raise NotWhole(f"checkpoint {path} is not whole: {error}") from error
    tensors = {name: _join(tensor, pieces) for name, tensor in chosen.items()}
    return Checkpoint(step=manifest.step, tensors=tensors, values=manifest.values, manifest=manifest)


def _read_pieces(
    folder_fd: int, manifest: Manifest, chosen: Mapping[str, TensorEntry], *, check_all: bool
) -> dict[tuple[str, str], bytearray]:
    wanted: dict[str, set[str]] = {name: set() for name in manifest.files}
    for tensor in chosen.values():
        for piece in tensor.pieces:
            wanted[piece.file].add(piece.key)
    layouts = manifest.layouts()
    found = {}
    for name, entry in manifest.files.items():
        if wanted[name] or check_all:
            shard = read_shard(folder_fd, name, entry, layouts[name], wanted=wanted[name], check_all=check_all)
            found.update({(name, key): data for key, data in shard.items()})
    return found


def _join(tensor: TensorEntry, pieces: dict[tuple[str, str], bytearray]) -> Tensor:
    if len(tensor.pieces) == 1:
        piece = tensor.pieces[0]
        return from_bytes(pieces.pop((piece.file, piece.key)), tensor.dtype, tensor.shape)
    whole = empty(tensor.dtype, tensor.shape)
    for piece in tensor.pieces:
        part = from_bytes(pieces.pop((piece.file, piece.key)), tensor.dtype, piece.shape)
        if math.prod(piece.shape):
            region = tuple(slice(start, start + extent) for start, extent in zip(piece.start, piece.shape, strict=True))
            whole[region] = part
    return whole
