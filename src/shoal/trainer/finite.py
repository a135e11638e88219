"""Which rank and which parameter a NaN or infinity came from.

After the reduction every rank holds the same bad gradient, so the origin is gone. Weights have not been touched yet and
dropout is keyed, so running the local microbatches again gives the same numbers: each rank looks at its own before they are
added.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.data.loader import StepBatch
from shoal.parallel import batchnorm
from shoal.trainer.step import StepRunner

_FINE = -2
_LOSS = -1


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a non-finite value was first seen."""

    rank: int
    what: str
    """A parameter's name, or ``loss``."""


def trace_nonfinite(runner: StepRunner, batch: StepBatch, *, step: int, scale: float) -> Origin:
    """Find the first rank whose own loss or gradient is not finite. Every rank must call this together."""
    names = sorted(name for name, parameter in runner.model.named_parameters() if parameter.requires_grad)
    bad: set[str] = set()

    def look(name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if not bool(torch.isfinite(gradient).all()):
                bad.add(name)

        return hook

    parameters = dict(runner.model.named_parameters())
    hooks = [parameters[name].register_hook(look(name)) for name in names]  # type: ignore[no-untyped-call]
    try:
        with runner.reduction.local():
            loss = runner.accumulate(batch, step=step, scale=scale, reduce=False)
    finally:
        for handle in hooks:
            handle.remove()
        for parameter in parameters.values():
            parameter.grad = None
    verdict = _FINE
    spoilt = [name for name, weight in runner.reduction.updated.items() if not bool(torch.isfinite(weight).all())]
    if spoilt:
        # Told apart from its effects, which a split layer spreads to its neighbours.
        verdict = len(names) + names.index(spoilt[0])
    elif not math.isfinite(float(loss)):
        verdict = _LOSS
    elif bad:
        verdict = min(names.index(name) for name in bad)
    verdicts = runner.world.gather(torch.tensor([verdict], device=runner.world.device))
    # The forward passes above left notes for the running statistics; they are of a step that counts for nothing.
    batchnorm.fold(runner.model, keep=False)
    found = [int(tensor) for tensor in verdicts]
    for rank, place in enumerate(found):
        if place >= len(names):
            return Origin(rank=rank, what=f"weight {names[place - len(names)]}")
    for rank, place in enumerate(found):
        if place != _FINE:
            return Origin(rank=rank, what="loss" if place == _LOSS else names[place])
    # Finite on every rank alone: the overflow happened in the sum over ranks.
    return Origin(rank=0, what="sum over replicas")
