"""The gradient of one replica's microbatches, or of one worker's, added in its plan's order: what every reference is made of.

One partial sum per direction of a bidirectional pipeline, per rank of a stage whose ranks take turns, and per stage that uses a
tied weight; these are added in this order. A parameter that no microbatch touches has no gradient, and an optimizer skips it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add

import torch
from torch import Tensor

from shoal.verify.case import Tree
from shoal.verify.parts import Ids, Parts, batch_loss, gradients_of
from shoal.verify.uses import split_uses

Way = list[tuple[int, Ids]]
"""Microbatches of a step, by number."""


def group_gradients(
    parts: Parts, step: int, group: Sequence[Ids], tree: Tree, *, total: float, scale: float = 1.0
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
