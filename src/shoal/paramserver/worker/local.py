"""A worker that goes its own number of steps, at its own step size, and pushes a direction that is comparable with the others'.

Workers of different speed that each train for as long as they have time, and whose weights are then averaged, do not minimise
the mean of their objectives: the one that took the most steps pulls hardest. FedNova (Wang et al. 2020, arXiv:2007.07481) divides
what a worker moved by how far its steps could have taken it, so that only its share of the samples decides:

    d_i = (w - w_i) / (eta_i |a_i|)            what the worker pushes; for plain SGD |a_i| is its number of steps
    w <- w - eta tau sum p_i d_i               what the servers do (``aggregation.fednova``); tau = sum p_i |a_i|

``|a_i|`` is the sum of the weights with which the gradients entered the move. With momentum ``rho`` an early one is taken over
and over (the paper's section 4.1):  |a_i| = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho).

A push is a gradient like any other: a server that takes SGD steps at rate eta, and counts it by ``consistency.fednova_factors``,
does the second line.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.errors import RequestError, RunError


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """How one worker trains between two pushes. Workers may differ in all of it."""

    steps: int
    """Steps it takes."""
    lr: float
    momentum: float = 0.0
    batch: int = 1
    """Samples of one step."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not self.lr > 0 or not 0 <= self.momentum < 1:
            raise RequestError(
                f"{self.steps} local steps of {self.batch} samples at lr {self.lr:g} and momentum {self.momentum:g}: steps and "
                "samples must be at least 1, lr above 0, and momentum from 0 to below 1"
            )


def effective_steps(steps: int, momentum: float = 0.0) -> float:
    """``|a_i|``: how many plain steps these are worth; their number without momentum."""
    if not momentum:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@dataclass(frozen=True, kw_only=True)
class Direction:
    """What a worker pushes after its steps."""

    direction: Tensor
    """``d_i``: flat, of the size of one gradient."""
    steps: float
    """``|a_i|``."""
    num_samples: int
    """Samples that it went through; what its share is made of unless the driver has fixed shares."""
    rate: float
    version: int
    """Of the weights that it began from."""


@torch.no_grad()
def train_locally(
    weights: Tensor, gradient_at: Callable[[Tensor, int], Tensor], settings: LocalSettings, *, version: int = 0
) -> Direction:
    """Take this worker's steps from the servers' weights; the weights themselves are left as they are.

    Args:
        weights: flat, as fetched.
        gradient_at: the flat gradient at some weights of this worker's step number so and so.
        settings: how many steps, and how far.
        version: of the weights.

    Raises:
        RunError: a gradient does not fit, or the steps led out of the finite numbers.
    """
    local = weights.detach().clone()
    velocity = torch.zeros_like(local)
    for step in range(settings.steps):
        gradient = gradient_at(local, step)
        if gradient.shape != local.shape or gradient.dtype != local.dtype:
            raise RunError(
                f"local step {step} gave a gradient of {gradient.dtype} {tuple(gradient.shape)} for weights of {local.dtype} "
                f"{tuple(local.shape)}"
            )
        velocity.mul_(settings.momentum).add_(gradient)
        local.add_(velocity, alpha=-settings.lr)
    count = effective_steps(settings.steps, settings.momentum)
    # One step is its gradient: going there and back again would only round it.
    direction = velocity if settings.steps == 1 else (weights.detach() - local).div_(settings.lr * count)
    if not torch.isfinite(direction).all():
        raise RunError(
            f"{settings.steps} local steps at lr {settings.lr:g} led out of the finite numbers; use a lower lr"
        )
    return Direction(
        direction=direction,
        steps=count,
        num_samples=settings.steps * settings.batch,
        rate=settings.lr,
        version=version,
    )
