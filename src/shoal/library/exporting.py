"""``run.export``: what a script trains, written for other programs by the first rank, from any plan.

The module that a script holds is laid out as its plan says, so a plain one gets the whole weights and is written. A model of
``transformers`` is built from its own config; any other class only the script can build.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.checkpoint.export.model import FORMATS, write_model
from shoal.checkpoint.export.weights import new_folder, write_tensors
from shoal.core.errors import RequestError, did_you_mean
from shoal.data.batchform import ModelInputs
from shoal.engine.state import export_random_state, import_random_state
from shoal.models.hugging_face import build_again

Build = Callable[[], nn.Module]

_ALL = ("safetensors", *FORMATS)


def check_export(model: nn.Module, path: object, *, format: str, plain: object) -> tuple[Path, Build | None]:
    """Where an export goes, and how a plain module for it is built; None where weights alone are written.

    Args:
        model: that is trained, laid out by the plan.
        path: that the script gave.
        format: that it gave.
        plain: a module as ``model`` was before, or a function that makes one.

    Raises:
        RequestError: one of them is wrong, or the format needs a module and there is none.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise RequestError(f'run.export({path!r}) is no path of a folder; give one, such as run.export("exported")')
    if format not in _ALL:
        raise RequestError(f"there is no format {format!r}; {did_you_mean(format, _ALL)}")
    kind = type(model).__name__
    if plain is model:
        raise RequestError(
            f"run.export(plain=) was given the {kind} that is trained, which the plan has laid out; give it another, plain="
            f"{kind}(...), or a function that makes one"
        )
    if plain is not None and not callable(plain):
        raise RequestError(f"run.export(plain={plain!r}) is no module; give {kind}(...), or a function that makes one")
    if format == "safetensors":
        return Path(path), None
    build: Build | None = (
        build_again(model) if plain is None else (lambda: plain) if isinstance(plain, nn.Module) else plain
    )
    if build is None:
        raise RequestError(
            f"run.export(format={format!r}) writes a plain {kind} with the whole weights, which only the script can build: give "
            f"plain={kind}(...), or a function that makes one, which the first rank alone calls"
        )
    return Path(path), build


def write_export(
    weights: Mapping[str, Tensor],
    path: Path,
    build: Build | None,
    inputs: ModelInputs,
    *,
    format: str,
    facts: Mapping[str, Any],
) -> str:
    """Write an export; returns what to tell of it.

    Args:
        weights: of the whole model, by the names of its state dict.
        path: the folder to make.
        build: makes a plain module for them; None writes them alone.
        inputs: of two samples.
        format: of the export.
        facts: of the training, for ``config.json`` beside weights alone.

    Raises:
        RequestError: the module is another one, or has no such form; an extra is missing; the folder is there already.
        RunError: what was written does not give what the model gives, or the disk refused.
    """
    with new_folder(path) as draft:
        if build is None:
            write_tensors(weights, draft, facts=facts)
            return f"exported {len(weights)} tensors to {path}"
        model = _fill(build, weights)
        error = write_model(model, inputs, draft, format=format)
    return f"exported {path} ({format}), which run on the same inputs differs from the trained model by {error:.1e}"


def _fill(build: Build, weights: Mapping[str, Tensor]) -> nn.Module:
    """A plain module with these weights. What its making draws at random is drawn on the first rank only, and is put back."""
    states = export_random_state(0)
    model = build()
    import_random_state(states, 0)
    given: object = model
    if not isinstance(given, nn.Module):
        raise RequestError(
            f"run.export(plain=) makes a {type(given).__name__}; give a function that makes an nn.Module"
        )
    model = model.to(device="cpu", dtype=next(one.dtype for one in weights.values() if one.is_floating_point())).eval()
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise RequestError(
            f"run.export(plain=) is not built as the model that is trained, whose weights do not fit it: {said}"
        ) from error
    return model
