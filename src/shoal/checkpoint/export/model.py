"""A trained model for other programs: written, loaded back, and run on the same inputs.

The model is a plain one with its whole weights, whatever plan trained it. What does not give what it gives is refused.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.export.program import compare_outputs, run_onnx, write_onnx, write_program
from shoal.data.batchform import BatchForm, ModelInputs, call_model
from shoal.models.hugging_face import as_transformers, load_back, logits_of
from shoal.models.lora import merge_adapters

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


def write_model(model: nn.Module, inputs: ModelInputs, folder: Path, *, format: str) -> float:
    """Write a model, and say how far what was written is from it on the same inputs. Adapters are added to what they adapt.

    Args:
        model: plain, with its weights, in evaluation mode; adapters in it are merged.
        inputs: of two samples.
        folder: where to; it exists.
        format: one of ``FORMATS``.

    Raises:
        RequestError: the model has no such form, or an extra is not installed.
        RunError: what was written does not give what the model gives.
    """
    with quietly():
        expected = logits_of(call_model(model, inputs))
        merge_adapters(model)
        found = _WRITERS[format](model, _bare_inputs(model, inputs, expected), folder)
    return compare_scores(expected, found, format=format)


def compare_scores(expected: Tensor, found: Tensor, *, format: str) -> float:
    """How far the scores of an export are from the model's.

    Raises:
        RunError: further than their type allows.
    """
    bound = _BOUNDS.get(expected.dtype, _COARSE)
    return compare_outputs(expected, found, what=f"the format {format}", bound=bound)


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, nothing keeps a gradient, and what exporters warn of is not shown."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _bare_inputs(model: nn.Module, inputs: ModelInputs, expected: Tensor) -> ModelInputs:
    """The inputs without labels, where the model's scores do not need them: who uses an export has none."""
    bare = inputs.without_labels()
    if bare is inputs:
        return inputs
    try:
        found = logits_of(call_model(model, bare))
    except Exception:  # The model is the user's own; one with an encoder makes its decoder's inputs of labels.
        return inputs
    return bare if found.shape == expected.shape and torch.equal(found, expected) else inputs


def _write_hf(model: nn.Module, inputs: ModelInputs, folder: Path) -> Tensor:
    known = as_transformers(model)
    known.save_pretrained(folder)
    again = load_back(folder, known)
    if model is not known and not isinstance(model, type(known)) and known in list(model.children()):
        # A module of the user's own around it says how it is called.
        name = next(name for name, one in model.named_children() if one is known)
        setattr(model, name, again)
        again = model
    return logits_of(call_model(again, inputs))


def _write_program(model: nn.Module, inputs: ModelInputs, folder: Path) -> Tensor:
    is_plain = inputs.form is None and isinstance(model(*inputs), Tensor)
    path = write_program(model if is_plain else _Scores(model, inputs.form), tuple(inputs), folder)
    return logits_of(torch.export.load(path).module()(*inputs))


def _write_onnx(model: nn.Module, inputs: ModelInputs, folder: Path) -> Tensor:
    scores = _Scores(model, inputs.form)
    return run_onnx(write_onnx(scores, tuple(inputs), folder, names=inputs.names(model)), tuple(inputs))


_WRITERS = {"hf": _write_hf, "torch-export": _write_program, "onnx": _write_onnx}
FORMATS = tuple(_WRITERS)
"""Those that write a model, and not its weights alone."""
