"""The model of a run for other programs, from a checkpoint of any plan: written, loaded back, and run on the same inputs.

An export that does not give what the trained model gives is refused, and nothing is left of it.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.export.model import compare_scores, quietly, write_model
from shoal.core.errors import RequestError
from shoal.data.batchform import call_model
from shoal.engine.state import import_weights
from shoal.models.hugging_face import held_transformers, logits_of
from shoal.models.lora import adapter_state, base_state, load_adapters, write_adapters
from shoal.optim.precision import Precision
from shoal.trainer.build import LoadedRun, build_parts, load_run
from shoal.trainer.config import Recipe


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
    if format != "peft":
        return write_model(run.model, inputs, folder, format=format)
    with quietly():
        expected = logits_of(call_model(run.model, inputs))
        found = logits_of(call_model(_write_peft(run, folder), inputs))
    return compare_scores(expected, found, format=format)


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
