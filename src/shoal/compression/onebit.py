"""1-bit Adam (Tang et al. 2021) and 1-bit LAMB (Li et al. 2021): Adam until the variance is steady, then signs of the momentum.

In the warm-up both moments follow the averaged gradient. After it the variance is frozen, each replica moves its own momentum
with its own gradient, the momenta are sent as scaled signs with error feedback, and their mean is everyone's momentum.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Adam's moments, flat."""

    momentum: Tensor
    variance: Tensor


def warm_up(moments: Moments, gradient: Tensor, beta1: float, beta2: float) -> Moments:
    """Both moments after a step of the warm-up, of the averaged gradient (Kingma and Ba 2015, algorithm 1)."""
    variance = (moments.variance * beta2).add_((gradient * gradient).mul_(1 - beta2))
    return Moments(move(moments.momentum, gradient, beta1), variance)


def move(momentum: Tensor, gradient: Tensor, beta1: float) -> Tensor:
    """``b1 m + (1 - b1) g``: after the warm-up, a replica's momentum before it is compressed (Tang 2021, algorithm 1)."""
    return (momentum * beta1).add_(gradient * (1 - beta1))


def agree(moments: Moments, momentum: Tensor) -> Moments:
    """The moments with the momentum that the replicas agreed on; the variance stays as it was frozen."""
    return replace(moments, momentum=momentum)


def direction(moments: Moments, eps: float) -> Tensor:
    """``m / (sqrt(v) + eps)``, which the learning rate multiplies (Tang 2021, algorithm 1: no bias correction)."""
    return moments.momentum / moments.variance.sqrt().add_(eps)


def rebuild_gradient(before: Tensor, after: Tensor, beta1: float) -> Tensor:
    """The averaged gradient that the agreed momenta imply, ``(m' - b1 m) / (1 - b1)``, for LAMB (Li 2021, section 4)."""
    return (after - before * beta1).div_(1 - beta1)


def lamb_factor(
    frozen: Tensor, fresh: Tensor, previous: float, *, least: float = 0.5, most: float = 4.0, change: float = 0.1
) -> float:
    """How LAMB's frozen coefficient is scaled: the largest ``sqrt(frozen / fresh)`` of a layer, clipped (Li 2021, section 4).

    ``frozen`` is the variance at the end of the warm-up and ``fresh`` one that follows ``rebuild_gradient``. The factor moves by
    at most ``change`` of itself in a step.
    """
    ratio = float(torch.sqrt(frozen).div_(torch.sqrt(fresh).clamp_(min=2.0**-126)).max())
    bounded = min(max(ratio, least), most)
    return min(max(bounded, previous * (1 - change)), previous * (1 + change))
