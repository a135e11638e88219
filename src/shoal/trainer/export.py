"""The model of a run for other programs, from a checkpoint of any plan: written, loaded back, and run on the same inputs.

An export that does not give what the trained model gives is refused, and nothing is left of it.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.export import compare_outputs, run_onnx, write_onnx, write_program
from shoal.data.batchform import BatchForm, call_model
from shoal.engine.state import import_weights
from shoal.models.hugging_face import as_transformers, load_back, logits_of
from shoal.models.lora import merge_adapters
from shoal.trainer.build import load_run

_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""How far an export may be from the trained model, by the type of its weights."""
_COARSE = 2e-2
"""In a type of 16 bits."""


class _Scores(nn.Module):
    """A model that takes tensors by place and returns its scores alone, whatever its samples and outputs look like."""

    def __init__(self, model: nn.Module, form: BatchForm | None) -> None:
        super().__init__()
        self.model = model
        self._form = form

    def forward(self, *tensors: Tensor) -> Tensor:
        """The scores of a batch."""
        output = self.model(*tensors) if self._form is None else self._form.call(self.model, tensors)
        return logits_of(output)


def export_model(run_dir: Path, weights: Mapping[str, Tensor], folder: Path, *, format: str, origin: str) -> float:
    """Write a run's model with these weights, and say how far it is from the trained model on the same inputs.

    Adapters are added to the layers that they adapt.

    Args:
        run_dir: the run, whose recipe says how the model is built and what its inputs are.
        weights: of a checkpoint, whole.
        folder: where to; it exists.
        format: hf, torch-export or onnx.
        origin: where the weights are from.

    Raises:
        RequestError: the model has no such form, or an extra is not installed.
        RunError: what was written does not give what the model gives.
    """
    run = load_run(run_dir)
    # The run gives its newest weights; the ones asked for may be older.
    import_weights(run.model, weights, origin=origin)
    inputs = run.example_inputs
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = logits_of(call_model(run.model, inputs))
        merge_adapters(run.model)
        form = getattr(inputs, "form", None)
        plain = tuple(inputs)
        found = _WRITERS[format](run.model, form, plain, folder)
    bound = _BOUNDS.get(expected.dtype, _COARSE)
    return compare_outputs(expected, found, what=f"--format {format}", bound=bound)


def _write_hf(model: nn.Module, form: BatchForm | None, inputs: tuple[Tensor, ...], folder: Path) -> Tensor:
    known = as_transformers(model)
    known.save_pretrained(folder)
    again = load_back(folder, known)
    if model is not known and not isinstance(model, type(known)) and known in list(model.children()):
        # A module of the user's own around it says how it is called.
        name = next(name for name, one in model.named_children() if one is known)
        setattr(model, name, again)
        again = model
    output: Any = again(*inputs) if form is None else form.call(again, inputs)
    return logits_of(output)


def _write_program(model: nn.Module, form: BatchForm | None, inputs: tuple[Tensor, ...], folder: Path) -> Tensor:
    is_plain = form is None and isinstance(model(*inputs), Tensor)
    path = write_program(model if is_plain else _Scores(model, form), inputs, folder)
    return logits_of(torch.export.load(path).module()(*inputs))


def _write_onnx(model: nn.Module, form: BatchForm | None, inputs: tuple[Tensor, ...], folder: Path) -> Tensor:
    return run_onnx(write_onnx(_Scores(model, form), inputs, folder), inputs)


_WRITERS = {"hf": _write_hf, "torch-export": _write_program, "onnx": _write_onnx}
