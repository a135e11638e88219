"""The model of a run for other programs, from a checkpoint of any plan: written, loaded back, and run on the same inputs.

An export that does not give what the trained model gives is refused, and nothing is left of it.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.export import compare_outputs, run_onnx, write_onnx, write_program
from shoal.core.errors import RequestError
from shoal.data.batchform import BatchForm, ModelInputs, call_model
from shoal.engine.state import import_weights
from shoal.models.hugging_face import as_transformers, held_transformers, load_back, logits_of
from shoal.models.lora import adapter_state, base_state, load_adapters, merge_adapters, write_adapters
from shoal.optim.precision import Precision
from shoal.trainer.build import LoadedRun, build_parts, load_run
from shoal.trainer.config import Recipe

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

    Adapters are added to the layers that they adapt, but for ``peft``, which are the adapters alone.

    Args:
        run_dir: the run, whose recipe says how the model is built and what its inputs are.
        weights: of a checkpoint, whole.
        folder: where to; it exists.
        format: hf, peft, torch-export or onnx.
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
        if format == "peft":
            found = logits_of(call_model(_write_peft(run, folder), inputs))
        else:
            merge_adapters(run.model)
            found = _WRITERS[format](run.model, _bare_inputs(run.model, inputs, expected), folder)
    bound = _BOUNDS.get(expected.dtype, _COARSE)
    return compare_outputs(expected, found, what=f"--format {format}", bound=bound)


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


def _write_peft(run: LoadedRun, folder: Path) -> nn.Module:
    """Write the adapters of a run, and load them back onto its base model."""
    recipe = run.recipe
    if recipe.model.lora is None:
        raise RequestError(
            f"--format peft writes the adapters of model.lora, and the recipe of {run.run_dir} has none; use --format hf or "
            "safetensors for the whole model"
        )
    whole = _base_model(recipe, run)
    inside, base = held_transformers(whole) or ("", whole)
    init = recipe.model.init
    is_known = init is not None and (Path(init.path) / "config.json").is_file()
    write_adapters(run.model, folder, base=base, inside=inside, source=init.path if init and is_known else None)
    loaded = load_adapters(base, folder)
    if not inside:
        return loaded
    # A module of the user's own around it says how it is called.
    setattr(whole, inside, loaded)
    return whole


def _base_model(recipe: Recipe, run: LoadedRun) -> nn.Module:
    """The model of a run before it was adapted and trained.

    Raises:
        RequestError: training changed more of it than adapters hold.
    """
    init = recipe.model.init
    has_source = init is None or Path(init.path).exists()
    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": None})})
    base, _, _ = build_parts(plain, data=run.data, loads=has_source)
    base = base.to(dtype=Precision.named(recipe.train.precision).weight_dtype).eval()
    trained = base_state(run.model)
    if not has_source:
        base.load_state_dict(trained)
        return base
    kept = {name.replace(".base_layer.", ".") for name in adapter_state(run.model)}
    for name, tensor in base.state_dict().items():
        if name not in kept and not torch.equal(tensor, trained[name]):
            raise RequestError(
                f"--format peft: training changed {name!r}, which is no part of an adapter, so that the base model with the "
                "adapters is not the trained model; use --format hf or safetensors for the whole model"
            )
    return base


_WRITERS = {"hf": _write_hf, "torch-export": _write_program, "onnx": _write_onnx}
