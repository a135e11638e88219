"""Weights for other programs: safetensors, with what the recipe says of the model.

Only weights are read from the checkpoint, and only bytes whose sums agree are written. An export appears whole under its name
or not at all, and never over something that is already there.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.commit import remove
from shoal.checkpoint.files import draw_id, new_file, sync_folder
from shoal.checkpoint.pieces import as_blob
from shoal.checkpoint.reader import Checkpoint, read
from shoal.checkpoint.shard import write_shard
from shoal.core.errors import RequestError, RunError

WEIGHTS = "weights/"
"""Prefix of the names of weights in a checkpoint."""
_AVERAGES = "callbacks/ema/"
"""Prefix of what the callback ``ema`` keeps beside each trained weight."""


def read_weights(path: Path, *, averaged: bool = False) -> Checkpoint:
    """A checkpoint with its weights alone; optimizer state is neither read nor held.

    Args:
        path: its folder.
        averaged: the weights of the callback ``ema`` in place of the trained ones; what it does not average, such as buffers
            and frozen parameters, is as it was trained.

    Raises:
        NotWhole: a file that holds weights is not as it was written.
        RequestError: averaged ones were asked for, and it has none.
        RunError: the checkpoint has no weights.
    """
    prefixes = (WEIGHTS, _AVERAGES) if averaged else (WEIGHTS,)
    checkpoint = read(path, wanted=lambda name: name.startswith(prefixes))
    trained = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(WEIGHTS)}
    if not trained:
        raise RunError(f"{path} holds no weights: no tensor's name begins with {WEIGHTS!r}")
    averages = {
        WEIGHTS + name.removeprefix(_AVERAGES): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(_AVERAGES)
    }
    if averaged and not averages:
        raise RequestError(
            f"{path} holds no averaged weights: the run had no callback 'ema'; export the trained ones, or train with "
            'callbacks = ["ema"]'
        )
    return replace(checkpoint, tensors={**trained, **averages})


@contextlib.contextmanager
def new_folder(path: Path, *, like: Path | None = None) -> Iterator[Path]:
    """A folder to write into that gets its name ``path`` when the block ends well, and is gone when it does not.

    It can be read by those who can read ``like``: weights that were one user's own stay so until that user opens them.

    Raises:
        RequestError: something already has that name, or there is no folder to put it in.
        RunError: the disk refused.
    """
    if os.path.lexists(path):
        raise RequestError(f"{path} already exists; give another folder, or remove it first")
    if not path.parent.is_dir():
        raise RequestError(f"there is no folder {path.parent} to export into; make it first")
    draft = path.parent / f".tmp-{path.name}-{draw_id()}"
    try:
        draft.mkdir(mode=0o777 if like is None else stat.S_IMODE(like.stat().st_mode))
        yield draft
        sync_folder(draft)
        os.rename(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"cannot export to {path}: {error}") from error
    finally:
        remove(draft)


def write_weights(checkpoint: Checkpoint, folder: Path, *, model: Mapping[str, Any] | None = None) -> list[Path]:
    """Write ``model.safetensors``, under the names of the model, and a ``config.json`` with the recipe's ``[model]``.

    Args:
        checkpoint: from ``read_weights``.
        folder: where to; it exists.
        model: the recipe's ``[model]`` section, for ``config.json``.

    Raises:
        OSError: the disk refused.
    """
    weights = {name.removeprefix(WEIGHTS): tensor for name, tensor in checkpoint.tensors.items()}
    manifest = checkpoint.manifest
    facts = {"step": checkpoint.step, "plan": manifest.plan, "checkpoint_id": manifest.id}
    return write_tensors(weights, folder, model=model, facts=facts)


def write_tensors(
    weights: Mapping[str, Tensor], folder: Path, *, facts: Mapping[str, Any], model: Mapping[str, Any] | None = None
) -> list[Path]:
    """Write ``model.safetensors`` and ``config.json``.

    Args:
        weights: by the names of the model.
        folder: where to; it exists.
        facts: where they are from, for ``config.json``.
        model: the recipe's ``[model]`` section, for ``config.json``.

    Raises:
        OSError: the disk refused.
    """
    weights_path, config_path = folder / "model.safetensors", folder / "config.json"
    # Hugging Face's loaders refuse a file that does not say which framework's layout its tensors have.
    write_shard(weights_path, {name: as_blob(tensor) for name, tensor in weights.items()}, metadata={"format": "pt"})
    section = dict(model or {})
    name = str(section.pop("name", "own"))
    config = {
        "architectures": [f"shoal-{name}"],
        "model_type": f"shoal-{name}",
        "torch_dtype": _common_dtype(weights),
        **section,
        "shoal": dict(facts),
    }
    with new_file(config_path) as fd:
        os.write(fd, (json.dumps(config, indent=2) + "\n").encode())
    return [weights_path, config_path]


def _common_dtype(weights: Mapping[str, Tensor]) -> str:
    """The type of most of the floating elements."""
    counts: dict[str, int] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            name = str(tensor.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + tensor.numel()
    return max(counts, key=lambda name: counts[name], default="float32")
