"""Which rank and which parameter a NaN or infinity came from.

After the reduction every rank holds the same bad gradient, so the origin is gone. Weights have not been touched yet and
dropout is keyed, so running the local microbatches again gives the same numbers: each rank looks at its own before they are
added. Ranks that split a model pass a bad value on within the same pass; they run the same operations in the same order, so the
rank that met it first has it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.data.loader import StepBatch
from shoal.parallel import batchnorm
from shoal.trainer.step import StepRunner

_FINE = -2
_LOSS = -1
_NEVER = 2**62


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a non-finite value was first seen."""

    rank: int
    what: str
    """A parameter's name (whose gradient it is), ``weight`` and a name, or ``loss``."""


@dataclass
class _Sightings:
    """What one rank saw, in the order in which it ran."""

    clock: int = 0
    first_output: int = _NEVER
    first_gradient: int = _NEVER
    name: str = ""
    """The parameter of the first bad gradient."""


def trace_nonfinite(runner: StepRunner, batch: StepBatch, *, step: int, scale: float) -> Origin:
    """Find the rank that first met a value that is not finite. Every rank must call this together."""
    names = sorted(name for name, parameter in runner.model.named_parameters() if parameter.requires_grad)
    with _watching(runner.model, names) as seen:
        loss = runner.accumulate(batch, step=step, scale=scale, reduce=False)
    # The forward passes above left notes for the running statistics; they are of a step that counts for nothing.
    batchnorm.fold(runner.model, keep=False)
    verdict, when = _FINE, _NEVER
    spoilt = [name for name, weight in runner.reduction.updated.items() if not bool(torch.isfinite(weight).all())]
    if spoilt:
        # Told apart from its effects, which a split layer spreads to its neighbours.
        verdict, when = len(names) + names.index(spoilt[0]), -1
    elif not math.isfinite(float(loss)):
        verdict, when = _LOSS, seen.first_output
    elif seen.name:
        verdict, when = names.index(seen.name), seen.first_gradient
    found = runner.world.gather(torch.tensor([verdict, when], device=runner.world.device))
    told = sorted((int(when), rank, int(verdict)) for rank, (verdict, when) in enumerate(found) if verdict != _FINE)
    if not told:
        # Finite on every rank alone: the overflow happened in the sum over ranks.
        return Origin(rank=0, what="sum over replicas")
    _, rank, place = told[0]
    if place == _LOSS:
        return Origin(rank=rank, what="loss")
    return Origin(rank=rank, what=f"weight {names[place - len(names)]}" if place >= len(names) else names[place])


@contextmanager
def _watching(model: nn.Module, names: list[str]) -> Iterator[_Sightings]:
    """Look at every module's output and every parameter's gradient; gradients are forgotten afterwards."""
    seen = _Sightings()
    parameters = dict(model.named_parameters())

    def look_at_gradient(name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            seen.clock += 1
            if not seen.name and not bool(torch.isfinite(gradient).all()):
                seen.first_gradient, seen.name = seen.clock, name

        return hook

    def look_at_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        seen.clock += 1
        if seen.first_output == _NEVER and not all(_is_finite(leaf) for leaf in tree_leaves(output)):
            seen.first_output = seen.clock

    handles: list[Any] = [parameters[name].register_hook(look_at_gradient(name)) for name in names]  # type: ignore[no-untyped-call]
    handles += [module.register_forward_hook(look_at_output) for module in model.modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters.values():
            parameter.grad = None


def _is_finite(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())
