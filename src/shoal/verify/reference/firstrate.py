"""The rate that the first batch has, written a second time for the one process that plans are compared with."""

import math

from shoal.optim.config import OptimConfig


def with_first_rate(optim: OptimConfig, batch: int) -> OptimConfig:
    """The section with the rates and the decay of the first step's batch, as ``optim.scale`` and ``hold_half_life`` say."""
    base = optim.scale_base or batch
    times = {"none": 1.0, "linear": batch / base, "sqrt": math.sqrt(batch / base)}[optim.scale]
    groups = tuple(one if one.lr is None else one.model_copy(update={"lr": one.lr * times}) for one in optim.groups)
    found = optim.model_copy(update={"lr": optim.lr * times, "groups": groups})
    if optim.hold_half_life:
        found = found.model_copy(update={"betas": (optim.betas[0], optim.betas[1] ** (batch / base))})
    return found
