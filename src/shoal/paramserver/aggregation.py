"""How gradients, or weights, of several workers become one. Functions over flat tensors, with the formula beside each line.

Every operation rounds once (a product, then a sum): a compound one may round otherwise for the last elements of a tensor, and
then a shard would depend on where it is cut. Sums go from left to right, so the caller's order is the order of the bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def scaled_sum(gradients: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """``f_0 g_0 + f_1 g_1 + ...`` from left to right, as a new tensor. A factor of 1 changes no bit."""
    first, *others = [
        gradient if factor == 1.0 else gradient * factor for gradient, factor in zip(gradients, factors, strict=True)
    ]
    total = first.clone() if first is gradients[0] else first
    for gradient in others:
        total += gradient
    return total


def accumulate(gradients: Sequence[Tensor]) -> Tensor:
    """The plain sum, from left to right."""
    return scaled_sum(gradients, [1.0] * len(gradients))


def average(gradients: Sequence[Tensor], samples: Sequence[float]) -> Tensor:
    """The mean over samples: ``sum(n_i g_i) / sum(n_i)`` of gradients that are means over their own n_i."""
    total = sum(samples)
    return scaled_sum(gradients, [count / total for count in samples])


def fednova(
    weights: Tensor,
    locals_: Sequence[Tensor],
    *,
    shares: Sequence[float],
    steps: Sequence[float],
    rates: Sequence[float],
    rate: float | None = None,
) -> Tensor:
    """New weights from workers that took different numbers of local steps at different step sizes.

    Plain averaging would let the worker with the most steps decide where training goes; here each counts by its share alone.
    Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova).

    Args:
        weights: what all of them began with.
        locals_: what each of them ended with.
        shares: p_i, what each counts; adds up to 1 (its part of the samples).
        steps: tau_i, local steps of each.
        rates: eta_i, step size of each.
        rate: eta of the joint step; the mean of the workers' rates by their shares when left out.
    """
    # d_i = (w - w_i) / (eta_i tau_i)
    directions = [(weights - local) / (own * count) for local, own, count in zip(locals_, rates, steps, strict=True)]
    # tau_eff = sum p_i tau_i
    effective = sum(share * count for share, count in zip(shares, steps, strict=True))
    eta = rate if rate is not None else sum(share * own for share, own in zip(shares, rates, strict=True))
    # w <- w - tau_eff sum p_i eta d_i
    return weights - scaled_sum(directions, [effective * share * eta for share in shares])


def adasum(gradients: Sequence[Tensor]) -> Tensor:
    """Gradients that agree are averaged, those that do not are added: a pairwise tree over any number of them.

    Maleki et al. 2021, "Scaling Distributed Training with Adaptive Summation". Level by level, neighbours are joined;
    an odd one at the end goes up a level as it is. A round must be given whole tensors: dot products of parts are others.
    """
    level = list(gradients)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [_adasum_pair(left, right) for left, right in pairs] + level[len(level) // 2 * 2 :]
    return level[0].clone() if len(gradients) == 1 else level[0]


def _adasum_pair(left: Tensor, right: Tensor) -> Tensor:
    # In float64: the dot product of two large gradients loses its small difference from the squares in float32.
    wide_left, wide_right = left.double(), right.double()
    dot = torch.dot(wide_left.flatten(), wide_right.flatten())
    squares = [torch.dot(wide.flatten(), wide.flatten()) for wide in (wide_left, wide_right)]
    # (1 - g1.g2 / 2|g1|^2) g1 + (1 - g1.g2 / 2|g2|^2) g2; beside a zero gradient the other stays as it is.
    shares = [1.0 - torch.where(square > 0, dot / (2.0 * square), torch.zeros_like(dot)) for square in squares]
    return (shares[0] * wide_left + shares[1] * wide_right).to(left.dtype)


def compensate_delay(gradient: Tensor, weights_now: Tensor, weights_read: Tensor, strength: float) -> Tensor:
    """A late gradient moved to where the weights are now: ``g + lambda g * g * (w_now - w_read)``.

    Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation": the product of the gradient
    with itself stands for the diagonal of the Hessian.
    """
    curvature = gradient * gradient
    curvature *= weights_now - weights_read
    curvature *= strength
    return curvature.add_(gradient)
