"""Which rank and which parameter a NaN or infinity came from.

After the reduction every rank holds the same bad gradient, so the origin is gone. Weights have not been touched yet and
dropout is keyed, so running the local microbatches again gives the same numbers: each rank looks at its own before they are
added.
"""

import math
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
    runner.optimizer.zero_grad(set_to_none=True)
    loss = runner.accumulate(batch, step=step, scale=scale, reduce=False)
    verdict = _FINE
    if not math.isfinite(float(loss)):
        verdict = _LOSS
    else:
        for index, (_, parameter) in enumerate(runner.parameters):
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                verdict = index
                break
    verdicts = runner.world.gather(torch.tensor([verdict], device=runner.world.device))
    runner.optimizer.zero_grad(set_to_none=True)
    # The forward passes above left notes for the running statistics; they are of a step that counts for nothing.
    batchnorm.fold(runner.model, keep=False)
    for rank, found in enumerate(int(tensor) for tensor in verdicts):
        if found != _FINE:
            return Origin(rank=rank, what="loss" if found == _LOSS else runner.parameters[found][0])
    # Finite on every rank alone: the overflow happened in the sum over ranks.
    return Origin(rank=0, what="sum over replicas")
