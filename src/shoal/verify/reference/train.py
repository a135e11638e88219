"""One process, plain torch, the same global batches: what every plan is compared with.

Gradients are added in the plan's tree: microbatches in order, one partial sum per replica, these in rank order. Within a replica
there is one partial sum per direction of a bidirectional pipeline, per rank of a stage whose ranks take turns, and per stage that
uses a tied weight. A parameter that no microbatch touches has no gradient, and an optimizer skips it. Beside the tree stands the
flat sum, one forward pass over the whole global batch, which has no weight, share or order in common with it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import RequestError
from shoal.optim.build import set_rate
from shoal.optim.rates import rate
from shoal.verify.reference.case import COARSE_FLAT_BOUND, FLAT_BOUNDS, Case, Tree
from shoal.verify.reference.model import (
    Ids,
    ReferenceModel,
    assert_alone,
    batch_loss,
    build_reference,
    cut_batch,
    global_batches,
    gradients_of,
    measure_movement,
    norm_of,
    refuse_not_finite,
    refuse_untouched,
    weigh,
)
from shoal.verify.reference.recording import Recorder, model_tensors, saved_buffers
from shoal.verify.reference.rounding import find_narrow, find_zeros
from shoal.verify.reference.weight_uses import split_uses

Way = list[tuple[int, Ids]]
"""Microbatches of a step, by number."""


def group_gradients(
    parts: ReferenceModel, step: int, group: Sequence[Ids], tree: Tree, *, total: float, scale: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient, by the weights that the model has now; what no microbatch touched is left out.

    Args:
        parts: model and data.
        step: that the samples are of.
        group: microbatches in order; empty ones add nothing.
        tree: the order.
        total: weight of everything that the mean is over.
        scale: what the loss is multiplied by; it is still in the gradient.
    """
    partial = torch.zeros((), dtype=parts.precision.weight_dtype, device=parts.device)
    # Before tied weights are split, which are then several.
    named = parts.named
    terms: dict[str, list[Tensor]] = {name: [] for name, _ in named}
    for way in _ways(group, tree.directions):
        parts.optimizer.zero_grad(set_to_none=True)
        with split_uses(parts.model, tree) as split:
            leaves = {name: split.leaves.get(name, [parameter]) for name, parameter in named}
            turns = _Turns({name: leaves[name] for name in tree.turns if name in leaves}, tree.turns)
            for number, cut in way:
                value = batch_loss(parts, step, cut, total)
                with turns.of(number):
                    split.backward(value if scale == 1.0 else value * scale)
                partial = partial + value.detach()
        for name, own in leaves.items():
            terms[name] += turns.sums(name) if name in tree.turns else gradients_of(own)
    return partial, {name: reduce(add, found) for name, found in terms.items() if found}


class _Turns:
    """Sums of leaves by the rank whose turn a microbatch is, of as many ranks as the leaf's stage has."""

    def __init__(self, leaves: Mapping[str, Sequence[Tensor]], counts: Mapping[str, Sequence[int]]) -> None:
        self._leaves, self._counts = leaves, counts
        self._sums: dict[tuple[str, int, int], Tensor] = {}

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Surrounds a backward pass: what it adds to a leaf is added to the sum whose turn it is."""
        for name, leaves in self._leaves.items():
            for use, leaf in enumerate(leaves):
                leaf.grad = self._sums.get((name, use, microbatch % self._counts[name][use]))
        yield
        for name, leaves in self._leaves.items():
            for use, leaf in enumerate(leaves):
                if leaf.grad is not None:
                    self._sums[name, use, microbatch % self._counts[name][use]] = leaf.grad
                leaf.grad = None

    def sums(self, name: str) -> list[Tensor]:
        """A leaf's sums: the first rank of every stage that uses it, then the second of those that have one, and so on."""
        leaves, counts = self._leaves[name], self._counts[name]
        return [
            self._sums[name, use, turn]
            for turn in range(max(counts))
            for use in range(len(leaves))
            if (name, use, turn) in self._sums
        ]


def _ways(group: Sequence[Ids], directions: int) -> list[Way]:
    """A replica's microbatches by the direction in which they go through the pipeline; empty ones go nowhere."""
    half = len(group) if directions == 1 else (len(group) + 1) // 2
    numbered = list(enumerate(group))
    return [
        [(number, cut) for number, cut in way if len(cut)] for way in (numbered[:half], numbered[half:])[:directions]
    ]


_NARROW_BOUND = 1e-6
"""Where a float64 model reads weights in float32."""


def run_reference(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    """Train ``case.steps`` steps and record each in ``folder``; says what was found on the way.

    Raises:
        RequestError: the model draws random numbers of its own or by no sample, or its loss is not finite even here, or
            it leaves a parameter without a gradient where the plan needs one.
    """
    parts = build_reference(case)
    recorder = Recorder(folder, "reference")
    scale, flat_errors = parts.precision.first_loss_scale, []
    initial = {name: parameter.detach().clone() for name, parameter in parts.named}
    for step, ids in enumerate(global_batches(parts)):
        set_rate(parts.optimizer, rate(parts.optim, step, case.total_steps))
        flat = None if parts.has_batch_norm else flat_gradients(parts, step, ids, scale.scale)
        loss, gradients = tree_gradients(parts, step, ids, tree, scale.scale)
        if flat is not None:
            flat_errors.append(relative_distance(gradients, flat))
        norm = norm_of(list(gradients.values())) / scale.scale
        finite = math.isfinite(norm) and math.isfinite(loss)
        if not (parts.precision.scales_loss and math.isfinite(loss)):
            refuse_not_finite(loss, norm, step)
        captured = {f"grad/{name}": grad / scale.scale for name, grad in gradients.items()} if finite else {}
        if finite:
            apply_update(parts, gradients, norm, scale.scale)
        captured |= model_tensors(parts.named, parts.optimizer, saved_buffers(parts.model))
        recorder.add(loss=loss, norm=norm, skipped=not finite, tensors=captured)
        scale = scale.after_step(finite) if parts.precision.scales_loss else scale
    _refuse_odd_dropout(parts, tree, max(flat_errors, default=0.0))
    recorder.close(
        flat=max(flat_errors, default=None),
        movement=measure_movement(parts, initial),
        narrow=narrow_weights(parts, tree),
        zeros=find_zeros(parts, lambda other, step, ids: tree_gradients(other, step, ids, tree, 1.0)[1]),
    )
    assert_alone()
    return {"flat": max(flat_errors, default=None)}


def tree_gradients(
    parts: ReferenceModel, step: int, ids: Ids, tree: Tree, scale: float
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of one global batch, added in the plan's tree; still multiplied by ``scale``."""
    return add_replicas(replica_gradients(parts, step, ids, tree, scale))


def replica_gradients(
    parts: ReferenceModel, step: int, ids: Ids, tree: Tree, scale: float
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Each replica's share of the loss and of the gradient; still multiplied by ``scale``."""
    replicas = _groups_of(parts, ids, tree)
    total = max(1.0, sum(weigh(parts, cut) for group in replicas for cut in group))
    found = []
    for group in replicas:
        partial, own = group_gradients(parts, step, group, tree, total=total, scale=scale)
        if any(len(cut) for cut in group):
            refuse_untouched(parts, {name for name, _ in parts.named} - set(own))
        found.append((partial, own))
    return found


def add_replicas(replicas: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of all replicas, in their order."""
    sums: dict[str, Tensor] = {}
    for _, own in replicas:
        for name, grad in own.items():
            sums[name] = sums[name] + grad if name in sums else grad
    return float(reduce(add, [partial for partial, _ in replicas])), sums


def _groups_of(parts: ReferenceModel, ids: Ids, tree: Tree) -> list[list[Ids]]:
    """The microbatches of each replica."""
    replicas = cut_batch(ids, tree)
    if parts.case.joins_batch or (parts.case.batch_norm == "sync" and parts.has_batch_norm):
        # Statistics, or the loss, are those of microbatch i of all replicas together, so these run as one: there is then no tree
        # to keep.
        return [[np.concatenate(row) for row in zip(*replicas, strict=True)]]
    return replicas


def flat_gradients(parts: ReferenceModel, step: int, ids: Ids, scale: float) -> dict[str, Tensor]:
    """The gradient of the mean over the whole global batch, in one pass."""
    parts.optimizer.zero_grad(set_to_none=True)
    weight = float(parts.train.collate(ids).weight)
    (batch_loss(parts, step, ids, max(1.0, weight)) * scale).backward()  # type: ignore[no-untyped-call]
    return {name: grad for name, parameter in parts.named for grad in gradients_of([parameter])}


def _refuse_odd_dropout(parts: ReferenceModel, tree: Tree, flat: float) -> None:
    """Refuse a dropout whose mask depends on how many samples are beside it, where that is seen to change the gradient.

    That is seen by turning it off: what is then still different has another reason, and is no excuse.

    Raises:
        RequestError: names the dropout and the shape.
    """
    odd, bound = parts.dropout.odd_shapes(), FLAT_BOUNDS.get(parts.case.precision, COARSE_FLAT_BOUND)
    if not odd or flat <= bound:
        return
    ids = next(global_batches(parts))
    with parts.dropout.turned_off(odd):
        without = relative_distance(
            tree_gradients(parts, 0, ids, tree, 1.0)[1], flat_gradients(parts, 0, ids, scale=1.0)
        )
    if without <= max(bound, _NARROW_BOUND if narrow_weights(parts, tree) else 0.0):
        path, shape = next(iter(odd.items()))
        raise RequestError(
            f"dropout {path!r} sees a tensor of shape {shape}, in which no dim is known to be the batch, so its mask depends on "
            f"how many samples a microbatch has, and the gradient by {flat:.2g} of its size; put the batch first there, or set "
            "its p to 0 for the proof"
        )


def narrow_weights(parts: ReferenceModel, tree: Tree) -> list[str]:
    """In a float64 proof, the weights that the model reads in a smaller type, in any microbatch of the first step."""
    if parts.case.precision != "float64":
        return []
    found: set[str] = set()
    for group in _groups_of(parts, next(global_batches(parts)), tree):
        for cut in group:
            # One without a target has no weight.
            found |= set(find_narrow(batch_loss(parts, 0, cut, max(1.0, weigh(parts, cut))), parts.named))
    return sorted(found)


def relative_distance(gradients: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """How far two gradients are apart, over all tensors together, relative to the first; one that is not there is zeros."""
    apart = 0.0
    for name in {**gradients, **others}:
        found = [side[name].double() for side in (gradients, others) if name in side]
        apart += float((found[0] - found[1] if len(found) == 2 else found[0]).square().sum())
    size = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    return math.sqrt(apart / size) if size > 0 else math.sqrt(apart)


def apply_update(parts: ReferenceModel, gradients: Mapping[str, Tensor], norm: float, scale: float) -> None:
    """Clip by the norm, take the loss scale off, and let the optimizer step."""
    limit = parts.optim.clip
    shorten = limit / norm if limit is not None and norm > limit else 1.0
    for name, parameter in parts.named:
        parameter.grad = gradients.get(name)
        if parameter.grad is not None and shorten / scale != 1.0:
            parameter.grad = parameter.grad * (shorten / scale)
    parts.optimizer.step()
