"""A model as a program: one of ``torch.export``, or ONNX, and how far what it gives may be from the model."""

import contextlib
import inspect
import io
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.files import new_file
from shoal.core.errors import RequestError, RunError


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
            f"the format onnx needs {error.name}, which is not installed; install it: pip install 'shoal[onnx]'"
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
