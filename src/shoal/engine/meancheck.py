"""Whether a loss of the user's own is the mean over its items, looked at once before a run that splits its batch.

A step adds the losses of its microbatches, each weighted by its items. That is the loss of the whole batch exactly where the loss
is a mean over items. One that compares samples with one another, weighs classes or adds up is another one in parts, and
every plan would train on something else without a word. So a few samples are scored as a whole and in two parts.

Nothing of a run changes by it: the model is in evaluation mode and no gradient is kept; modes, buffers and random states are put
back.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.comm.global_batch import num_calls
from shoal.core.errors import ShoalError
from shoal.core.functions import call_own
from shoal.core.plan import Plan
from shoal.costs.tracer import preserved_state
from shoal.data.batchform import batch_of, call_model, map_targets, targets_of
from shoal.data.loading.loader import Microbatch
from shoal.data.loading.parts import build_order
from shoal.data.order import Position
from shoal.data.source import Items, Source
from shoal.data.spec import IGNORED
from shoal.engine.config import TrainConfig
from shoal.engine.objective import Objective, Scoring, StepFunction
from shoal.models.losses import Loss, by_targets, cross_entropy, squared_error
from shoal.optim.precision import Precision

_SAMPLES = 7
"""Odd, so that parts are unequal, and a number that few other dims have."""
_MOST_BYTES = 1 << 30
"""Of a copy of the model in float64, twice the bytes of its weights: a model with a larger one is not looked at so closely."""
_ROUNDINGS = 16
"""Of one item's loss beside the sums over items: an exponential, a sum, a logarithm, a few products, each of a few roundings."""


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """A loss of all samples, and the mean that its parts give."""

    whole: float
    parts: float
    added: float
    """The losses of the parts without weights."""
    bound: float
    """What rounding can make of the difference."""

    @property
    def differ(self) -> bool:
        return abs(self.whole - self.parts) > self.bound

    @property
    def is_sum(self) -> bool:
        return abs(self.whole - self.added) <= self.bound


def find_other_mean(
    model: nn.Module, loss: Loss | StepFunction, source: Source, *, plan: Plan, train: TrainConfig
) -> str | None:
    """What to tell the user of a loss that is no mean over items; None where it is one, or where it makes no difference.

    Args:
        model: as one process builds it; it is left as it was.
        loss: of its output and the targets, or the user's own step.
        source: the training split.
        plan: resolved.
        train: the recipe's section.
    """
    num_parts = plan.num_shares * (plan.microbatches or 1)
    num_samples = min(_SAMPLES, len(source), train.global_batch)
    if loss in (cross_entropy, by_targets, squared_error) or num_parts == 1 or num_samples < 2:
        return None
    before = num_calls()
    with preserved_state(model, training=False), torch.no_grad():
        ids = build_order(source, global_batch=num_samples, seed=train.seed).take(Position())[0]

        def look() -> _Scores | None:
            items = source.collate(ids)
            if items.form is None and not isinstance(loss, StepFunction):
                return _compare(model, loss, items, source.uniform_weight)
            return _compare_formed(
                model,
                loss,
                [(items, source.collate(ids[:cut]), source.collate(ids[cut:])) for cut in (1, num_samples // 2)],
            )

        try:
            found = call_own(look, what="the look at the loss")
        except ShoalError:
            # What does not run here will say so where it trains; some modules only do in training mode, or on one size.
            return None
    # One that gathers the global batch is no mean, and is computed as a whole.
    return None if found is None or num_calls() > before else _describe(found, num_samples, plan)


def joins_batch(model: nn.Module, loss: Loss, source: Source) -> bool:
    """True where model or loss make one loss of the global batch: they call ``shoal.all_gather``.

    Args:
        model: as one process builds it; it is left as it was.
        loss: of its output and the targets.
        source: the training split, of which some samples are run.
    """
    before, ids = num_calls(), np.arange(min(2, len(source)), dtype=np.int64)
    objective = Objective(model, Scoring(loss), precision=Precision.named("float32"), device=torch.device("cpu"))
    with preserved_state(model, training=True), torch.no_grad():
        try:
            call_own(lambda: objective(Microbatch.of(source.collate(ids), ids), 1.0), what="the look at the loss")
        except ShoalError:
            pass  # What does not run here will say so where it trains.
    return num_calls() > before


def _compare(model: nn.Module, loss: Loss, items: Items, uniform: int | None) -> _Scores | None:
    """The first way to part the samples in which the loss is no mean; None where it is one."""
    assert isinstance(items.targets, Tensor), "samples without a form have one target"
    inputs = [_cast(tensor, torch.float32) for tensor in items.inputs]
    output = model(*inputs)
    size = len(items.targets)
    found = None
    if all(_is_by_sample(leaf, size) for leaf in tree_leaves(output)):
        found = _first_difference(loss, items, uniform, lambda start, stop: _rows(output, start, stop))
        if found is None:
            return None
    # Outputs that are not one row per sample, such as a loss that the model computes, have to be made of each part. In float64,
    # because layers round a sample otherwise in another batch.
    if 8 * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) > _MOST_BYTES:
        return found
    precise = copy.deepcopy(model).double()
    inputs = [_cast(tensor, torch.float64) for tensor in items.inputs]
    return _first_difference(
        loss, items, uniform, lambda start, stop: precise(*(tensor[start:stop] for tensor in inputs))
    )


def _compare_formed(
    model: nn.Module, loss: Loss | StepFunction, parted: list[tuple[Items, Items, Items]]
) -> _Scores | None:
    """As ``_compare``, of samples that are collated as a whole and in parts: each batch is scored by itself, in float64."""
    if 8 * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) > _MOST_BYTES:
        return None
    precise = copy.deepcopy(model).double()
    scored = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    for parts in parted:
        whole, first, second = (_score_formed(precise, scored, items) for items in parts)
        weights = [items.weight for items in parts]
        if min(weights) == 0 or not all(math.isfinite(value) for value, _ in (whole, first, second)):
            continue
        eps = max(found for _, found in (whole, first, second))
        depth = _ROUNDINGS + math.log2(max(2, weights[0])) + sum(1 for _ in precise.modules())
        found = _Scores(
            whole=whole[0],
            parts=(first[0] * weights[1] + second[0] * weights[2]) / weights[0],
            added=first[0] + second[0],
            bound=depth * eps * max(abs(whole[0]), abs(first[0]), abs(second[0]), 1.0),
        )
        if found.differ:
            return found
    return None


def _score_formed(model: nn.Module, loss: Loss | StepFunction, items: Items) -> tuple[float, float]:
    """The loss of a batch, and how finely it is computed."""
    inputs = items.model_inputs.map(lambda tensor: _cast(tensor, torch.float64))
    targets = map_targets(items.targets, lambda tensor: _cast(tensor, torch.float64))
    if isinstance(loss, StepFunction):
        value = loss.read(loss.function(model, batch_of(items.form, inputs, targets)))[0]
    else:
        value = loss(call_model(model, inputs), targets_of(items.form, inputs, targets))
    # Many losses begin with ``.float()``, and so do those of Hugging Face models.
    return float(value), torch.finfo(value.dtype).eps


def _first_difference(
    loss: Loss, items: Items, uniform: int | None, output_of: Callable[[int, int], Any]
) -> _Scores | None:
    size = len(items.targets)
    for cut in sorted({1, size // 2}):
        scores = _score(loss, items, uniform, output_of, cut)
        if scores is not None and scores.differ:
            return scores
    return None


def _score(
    loss: Loss, items: Items, uniform: int | None, output_of: Callable[[int, int], Any], cut: int
) -> _Scores | None:
    """Score all samples, and those before and after a cut; None where a part has no item."""
    targets = items.targets
    assert isinstance(targets, Tensor), "samples without a form have one target"
    size = len(targets)
    slices = [(0, size), (0, cut), (cut, size)]
    weights = [_weight(targets[start:stop], uniform) for start, stop in slices]
    if min(weights) == 0 or weights[0] != items.weight:
        return None
    try:
        found = _losses(loss, targets, output_of, slices, torch.float64)
    except RuntimeError:
        # A loss with numbers of its own, such as weights of classes, may take its own type only.
        found = _losses(loss, targets, output_of, slices, torch.float32)
    (whole, first, second), largest, eps = found
    if not all(math.isfinite(value) for value in (whole, first, second)):
        return None
    # Torch adds by pairs: an item goes through as many roundings as the number of items has binary digits.
    depth = _ROUNDINGS + math.log2(max(2, targets.numel()))
    return _Scores(
        whole=whole,
        parts=(first * weights[1] + second * weights[2]) / weights[0],
        added=first + second,
        bound=depth * eps * max(largest, abs(whole), abs(first), abs(second)),
    )


def _losses(
    loss: Loss,
    targets: Tensor,
    output_of: Callable[[int, int], Any],
    slices: list[tuple[int, int]],
    dtype: torch.dtype,
) -> tuple[list[float], float, float]:
    """The loss of each slice of samples, the largest number among what was scored, and how finely the loss computes."""
    scored = copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss
    values, largest, eps = [], 0.0, torch.finfo(dtype).eps
    for start, stop in slices:
        output = tree_map(lambda leaf: _cast(leaf, dtype), output_of(start, stop))
        value = scored(output, _cast(targets[start:stop], dtype))
        values.append(float(value))
        # Many losses begin with ``.float()``, and then compute in that.
        eps = max(eps, torch.finfo(value.dtype).eps)
        found = [float(leaf.abs().max()) for leaf in tree_leaves(output) if _is_floating(leaf) and leaf.numel()]
        largest = max([largest, *found])
    return values, largest, eps


def _weight(targets: Tensor, uniform: int | None) -> int:
    return uniform * len(targets) if uniform is not None else int((targets != IGNORED).sum())


def _rows(output: Any, start: int, stop: int) -> Any:
    return tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, output)


def _is_by_sample(leaf: Any, size: int) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.ndim > 0 and len(leaf) == size
    return leaf is None or isinstance(leaf, bool | int | float | str)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if _is_floating(leaf) else leaf


def _describe(found: _Scores, num_samples: int, plan: Plan) -> str:
    measured = (
        f"{num_samples} samples have {found.whole:.6g} together and {found.parts:.6g} in two parts, weighted by items"
    )
    if found.is_sum:
        remedy = "it adds its items up: return the mean (reduction='mean')"
    else:
        remedy = (
            "weights of classes: return (weight[target] * F.cross_entropy(..., reduction='none')).mean(); a loss that compares "
            "samples: a plan with one microbatch, such as dp=1 or tp=2"
        )
    return (
        f"the loss is not the mean over its items: {measured}. Under {str(plan)!r} it is computed in parts, so this run trains "
        f"on another loss than one process does on the whole batch; {remedy}"
    )
