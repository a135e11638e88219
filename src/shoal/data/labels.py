"""Whether a loss counts the first label of a sequence, asked of the loss: it is changed, and nothing else.

A causal language model compares what it puts out at a position with the label of the next, so nothing is compared with the first
label; an encoder-decoder compares every one. Batches are weighed by the labels that count, and lengths differ, so one label too
many per sample would be another mean.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.batchform import ModelInputs, leaf_paths
from shoal.data.source import Items, Splits
from shoal.data.spec import IGNORED
from shoal.telemetry.rngstate import keeping_draws

_TRIED = 8
"""Samples that are looked at for one whose loss can be asked."""


def settle_labels(model: nn.Module, data: Splits, score: Callable[[ModelInputs], Any]) -> None:
    """Tell the data's collators whether the first label of a sequence counts.

    Args:
        model: as one process builds it; its modes and the generators are left as they were.
        data: samples that are dicts with ``labels``; others are left alone.
        score: the loss of the model on some inputs.
    """
    source = data.train
    collator = getattr(source, "collator", None)
    if collator is None or collator.uniform_weight is not None:
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        with keeping_draws(), torch.no_grad():
            model.eval()
            counts = _first_counts(source, score)
    finally:
        for module, was_training in modes:
            module.training = was_training
    for split in (data.train, data.validation, data.test):
        own = getattr(split, "collator", None)
        if own is not None:
            own.first_label_counts = counts


def _first_counts(source: Any, score: Callable[[ModelInputs], Any]) -> bool:
    for number in range(min(_TRIED, len(source))):
        items: Items = source.collate([number])
        labels = None if items.form is None else items.form.labels(items.inputs)
        if items.form is None or labels is None or labels.ndim != 2 or labels.shape[1] < 2:
            return True
        rest = labels[0, 1:]
        if not bool((rest != IGNORED).any()):
            continue
        other = _another(labels, rest)
        changed = labels.clone()
        changed[0, 0] = other
        place = next(place for path, place in leaf_paths(items.form.inputs) if path == "labels")
        inputs = items.model_inputs
        swapped = ModelInputs([changed if at == place else tensor for at, tensor in enumerate(inputs)], items.form)
        try:
            before, after = (float(score(given)) for given in (inputs, swapped))
        except Exception:  # What does not run here says so where it trains.
            return True
        return before != after
    return True


def _another(labels: Tensor, rest: Tensor) -> int:
    """A label that is not the first one, and that the model surely knows."""
    first = int(labels[0, 0])
    known = [int(value) for value in rest[rest != IGNORED].tolist()]
    return next((value for value in known if value != first), max(0, first - 1) if first > 0 else first + 1)
