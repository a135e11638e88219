"""Which rank and which parameter a NaN or infinity came from.

After the reduction every rank holds the same bad gradient, so the origin is gone. Weights have not been touched yet and
dropout is keyed, so running the local microbatches again gives the same numbers: each rank looks at its own before they are
added. Ranks that split a model pass a bad value on within the same pass; they run the same operations in the same order, so the
rank that met it first has it. Ranks of a pipeline are told apart by how far a microbatch had come when it went bad.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.comm.channel import is_silent
from shoal.data.loader import StepBatch
from shoal.engine.model import ParallelModel
from shoal.parallel import batchnorm

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


def trace_nonfinite(model: ParallelModel, batch: StepBatch, *, step: int, scale: float) -> Origin:
    """Find the rank that first met a value that is not finite. Every rank must call this together.

    Args:
        model: whose step it was.
        batch: what it ran on.
        step: its number.
        scale: the loss scale that it had.
    """
    # Of the whole model, so that all ranks mean the same parameter by a number.
    names = sorted({entry.parameter for entry in model.outline.values() if entry.parameter and entry.is_trained})
    runtime = model.runtime
    with _watching(model.model, names, runtime.clock if runtime is not None else None) as seen:
        loss: torch.Tensor | float = model.passes.accumulate(batch, step=step, scale=scale, reduce=False)
        if runtime is not None and seen.first_output != _NEVER:
            loss = math.nan  # Only the last stage has the loss; the stage that spoilt it may be another.
    # The forward passes above left notes for the running statistics; they are of a step that counts for nothing.
    batchnorm.fold(model.model, keep=False)
    verdict, when = _FINE, _NEVER
    spoilt = [name for name, weight in model.reduction.updated.items() if not bool(torch.isfinite(weight).all())]
    if spoilt:
        # Told apart from its effects, which a split layer spreads to its neighbours.
        verdict, when = len(names) + names.index(spoilt[0]), -1
    elif not math.isfinite(float(loss)):
        verdict, when = _LOSS, seen.first_output
    elif seen.name:
        verdict, when = names.index(seen.name), seen.first_gradient
    found = model.world.all_gather(torch.tensor([verdict, when], device=model.world.device))
    told = sorted((int(when), rank, int(verdict)) for rank, (verdict, when) in enumerate(found) if verdict != _FINE)
    if not told:
        # Finite on every rank alone: the overflow happened in the sum over ranks, or in the norm over all parameters.
        return Origin(rank=0, what="sum over replicas" if model.mesh.replicas.size > 1 else "gradient norm")
    _, rank, place = told[0]
    if place == _LOSS:
        return Origin(rank=rank, what="loss")
    return Origin(rank=rank, what=f"weight {names[place - len(names)]}" if place >= len(names) else names[place])


@contextmanager
def _watching(model: nn.Module, names: Sequence[str], clock: Callable[[], int] | None) -> Iterator[_Sightings]:
    """Look at every module's output and every parameter's gradient; gradients are forgotten afterwards.

    ``clock`` says when it is, where the order of this rank's own work does not.
    """
    seen = _Sightings()
    trained = set(names)
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in trained}

    def now() -> int:
        seen.clock += 1
        return seen.clock if clock is None else clock()

    def look_at_gradient(name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            when = now()
            if not seen.name and not bool(torch.isfinite(gradient).all()):
                seen.first_gradient, seen.name = when, name

        return hook

    def look_at_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if is_silent():
            return  # A unit of another stage, which is only asked for its shapes.
        when = now()
        if seen.first_output == _NEVER and not all(_is_finite(leaf) for leaf in tree_leaves(output)):
            seen.first_output = when

    handles: list[Any] = [
        parameter.register_hook(look_at_gradient(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
    ]
    handles += [module.register_forward_hook(look_at_output) for module in model.modules()]
    try:
        yield seen
        # What a split backward pass put off came past no hook.
        for name, parameter in parameters.items():
            if not seen.name and parameter.grad is not None and not _is_finite(parameter.grad):
                seen.first_gradient, seen.name = _NEVER - 1, name
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters.values():
            parameter.grad = None


def _is_finite(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())
