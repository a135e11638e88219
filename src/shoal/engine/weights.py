"""``load_weights``: a model of any plan, or a plain module, starts from weights that somebody else has trained."""

import weakref
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from shoal.checkpoint.pretrained import (
    LoadedWeights,
    Selection,
    copy_weights,
    load_module,
    match,
    open_weights,
    patterns,
)
from shoal.core.errors import RequestError
from shoal.engine.model import ParallelModel

_PARALLEL: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[ParallelModel]]" = weakref.WeakKeyDictionary()


def remember(parallel: ParallelModel) -> None:
    """Note which parallel model a module was laid out by, so that ``load_weights`` of the module knows its parts."""
    _PARALLEL[parallel.model] = weakref.ref(parallel)


def load_weights(
    model: nn.Module | ParallelModel,
    path: str | Path,
    *,
    strict: bool = True,
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
    only: str | Collection[str] = (),
    skip: str | Collection[str] = (),
) -> LoadedWeights:
    """Load pretrained weights into a model, under any plan: each rank reads its own part of the files.

    The files may be a Shoal checkpoint or a run directory, a safetensors file, or a Hugging Face folder with
    ``model.safetensors`` or its index. Nothing in them is executed. The types of the model stay as they are.

    Args:
        model: a plain module, before or after it was laid out, or the ``ParallelModel`` itself. All ranks call it together.
        path: of the weights.
        strict: refuse names that did not match, all in one message; otherwise load what fits and return the rest.
        prefix: names in the files begin with it and the model's do not; files' tensors without it are left alone.
        rename: beginnings of names in the files, and what the model has in their place; ``{"": "encoder."}`` puts one in front.
        only: patterns of the model's names to load, such as ``"encoder.*"``; all when left out.
        skip: patterns of the model's names that are left as they are, such as ``"head.*"``.

    Returns:
        What was loaded, and the names that did not match.

    Raises:
        RequestError: they do not fit, or there are none.
        RunError: a file is torn, altered or hostile.
    """
    if rename is not None and not isinstance(rename, Mapping):
        raise RequestError(f'rename={rename!r} is a dict of beginnings of names, such as {{"encoder.": "blocks."}}')
    selection = Selection(
        strict=strict, prefix=prefix, rename=dict(rename or {}), only=patterns(only), skip=patterns(skip)
    )
    if isinstance(model, nn.Module):
        laid_out = _PARALLEL.get(model)
        parallel = None if laid_out is None else laid_out()
        if laid_out is not None and parallel is None:
            raise RequestError("the model was laid out by a plan that is closed; load its weights before that")
        return (
            load_module(model, Path(path), selection) if parallel is None else load_parallel(parallel, path, selection)
        )
    return load_parallel(model, path, selection)


def load_parallel(model: ParallelModel, path: str | Path, selection: Selection) -> LoadedWeights:
    """Fill what this rank holds of the weights, and bring it to where forward passes read it.

    Optimizer state stays as it is: weights are loaded before the first step.
    """
    source = open_weights(Path(path))
    wanted = {
        entry.names: model.layout.placements[entry.parameter].whole_shape
        if entry.parameter is not None and entry.parameter in model.layout.placements
        else entry.shape
        for entry in model.outline.values()
    }
    decided = match(wanted, source.shapes, selection, origin=str(path))
    shards = model.state_dict(whole=False)
    copy_weights(
        source,
        decided,
        {name: shard.tensor for name, shard in shards.items()},
        {name: shard.placement for name, shard in shards.items()},
    )
    model.reduction.publish()
    for hook in model.hooks:
        # What a hook took from the weights, such as an average of them, begins anew from these.
        hook.on_attach(model)
    return decided
