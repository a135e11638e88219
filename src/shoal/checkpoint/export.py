"""Weights for other programs: safetensors with what the recipe says, a ``torch.export`` program, and ONNX.

Only weights are read from the checkpoint, and only bytes whose sums agree are written. An export appears whole under its name
or not at all, and never over something that is already there.
"""

import contextlib
import inspect
import io
import json
import logging
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
        "shoal": {"step": checkpoint.step, "plan": checkpoint.manifest.plan, "checkpoint_id": checkpoint.manifest.id},
    }
    with new_file(config_path) as fd:
        os.write(fd, (json.dumps(config, indent=2) + "\n").encode())
    return [weights_path, config_path]


def write_program(model: nn.Module, example_inputs: tuple[Tensor, ...], folder: Path) -> Path:
    """Write ``model.pt2``, a ``torch.export`` program of ``model`` in which the number of samples is free.

    Raises:
        RunError: the model has a part that torch.export cannot express.
        OSError: the disk refused.
    """
    inputs = tuple(_example(tensor) for tensor in example_inputs)
    free = tuple({0: torch.export.Dim.AUTO} if tensor.dim() else None for tensor in inputs)
    try:
        program = torch.export.export(model, inputs, dynamic_shapes=_for_forward(model, free))
    except (RuntimeError, TypeError, ValueError) as error:
        raise RunError(f"torch.export cannot express this model: {_first_line(error)}") from error
    path = folder / "model.pt2"
    with new_file(path) as fd, os.fdopen(os.dup(fd), "wb") as file:
        torch.export.save(program, file)
    return path


def write_onnx(
    model: nn.Module, example_inputs: tuple[Tensor, ...], folder: Path, *, names: Sequence[str] | None = None
) -> Path:
    """Write ``model.onnx``, in which the number of samples is free.

    Args:
        model: returns one tensor, which is called ``logits``.
        example_inputs: what it is called with.
        folder: where to; it exists.
        names: of the inputs; torch's own when left out.

    Raises:
        RequestError: an extra is not installed.
        RunError: the model has a part that ONNX cannot express.
        OSError: the disk refused.
    """
    try:
        import onnx
        import onnxruntime  # noqa: F401  (looked for before the work begins: the export is checked by it)
        import onnxscript  # noqa: F401  (torch.onnx imports it by itself, and says less where it is missing)
    except ImportError as error:
        raise RequestError(
            f"--format onnx needs {error.name}, which is not installed; install it: pip install 'shoal[onnx]'"
        ) from error
    inputs = tuple(_example(tensor) for tensor in example_inputs)
    free = tuple({0: torch.export.Dim.DYNAMIC} if tensor.dim() else None for tensor in inputs)
    path = folder / "model.onnx"
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            program = torch.onnx.export(
                model,
                inputs,
                dynamo=True,
                dynamic_shapes=_for_forward(model, free),
                input_names=names,
                output_names=["logits"],
                verbose=False,
            )
        assert program is not None, "dynamo=True gives a program"
        data = onnx.ModelProto.SerializeToString(program.model_proto)
    # torch.onnx has its own errors, and those of what it traces; protobuf has one for more than 2 GiB.
    except Exception as error:
        raise RunError(f"ONNX cannot express this model: {_first_line(error)}") from error
    with new_file(path) as fd, os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return path


def run_onnx(path: Path, inputs: tuple[Tensor, ...]) -> Tensor:
    """What ``onnxruntime`` makes of inputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    found = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
    return torch.from_numpy(found[0])


def compare_outputs(expected: Tensor, found: Tensor, *, what: str, bound: float) -> float:
    """How far what was exported is from the trained model: the norm of the difference over the norm of the model's output.

    Raises:
        RunError: further than ``bound``.
    """
    if expected.shape != found.shape:
        raise RunError(f"{what} gives {tuple(found.shape)} where the trained model gives {tuple(expected.shape)}")
    size = float(expected.double().norm())
    error = float((found.double() - expected.double()).norm()) / (size or 1.0)
    if not error <= bound:
        raise RunError(
            f"{what} differs from the trained model by {error:.3g}, and {bound:g} is allowed; nothing was exported"
        )
    return error


def _for_forward(model: nn.Module, free: tuple[Any, ...]) -> Any:
    """Free dims as torch.export takes them: those of ``forward(*tensors)`` belong to one argument."""
    kinds = [one.kind for one in inspect.signature(model.forward).parameters.values()]
    return (free,) if kinds == [inspect.Parameter.VAR_POSITIONAL] else free


def _first_line(error: Exception) -> str:
    """What an error says first; what it is where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _example(tensor: Tensor) -> Tensor:
    """An input that torch.export takes as one of many: a dim of size 1 would be fixed at 1, a view at the shape of its base."""
    if tensor.dim() and tensor.shape[0] == 1:
        tensor = tensor.expand(2, *tensor.shape[1:])
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _common_dtype(weights: Mapping[str, Tensor]) -> str:
    """The type of most of the floating elements."""
    counts: dict[str, int] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            name = str(tensor.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + tensor.numel()
    return max(counts, key=lambda name: counts[name], default="float32")
