"""Reading a checkpoint into tensors. Only bytes whose sums were checked become tensors, and no code is run by any of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.files import NotWhole, folder
from shoal.checkpoint.filling import fill
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.whole import Found, newest_whole, read_manifest, verify
from shoal.core.errors import RunError
from shoal.core.placement import Placement, place_whole

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
