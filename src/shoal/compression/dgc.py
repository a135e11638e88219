"""Deep Gradient Compression (Lin et al. 2018): momentum before the selection, so that what waits is not left behind.

The state of a replica is its momentum ``u`` and what it has not sent, ``v``. Each operation rounds once per element.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import Encoded
from shoal.compression.sparse import TopK


@dataclass(frozen=True)
class DGCState:
    """Momentum and unsent sum of one replica, flat."""

    momentum: Tensor
    unsent: Tensor


def start_state(like: Tensor) -> DGCState:
    """Nothing accumulated yet."""
    return DGCState(torch.zeros_like(like), torch.zeros_like(like))


def accumulate(state: DGCState, gradient: Tensor, momentum: float) -> DGCState:
    """Momentum correction: ``u = m u + g``, ``v = v + u`` (Lin et al. 2018, equation 4)."""
    velocity = (state.momentum * momentum).add_(gradient)
    return DGCState(velocity, state.unsent + velocity)


def send(state: DGCState, ratio: float) -> tuple[Encoded, DGCState]:
    """The largest of what is unsent, and the state after it: factor masking zeroes u and v where they are sent (equation 7)."""
    encoded = TopK(ratio).encode(state.unsent)
    places = encoded.payload[1].to(torch.int64)
    return encoded, DGCState(state.momentum.index_fill(0, places, 0.0), state.unsent.index_fill(0, places, 0.0))


def ratio_at(step: int, ratio: float, warmup: int, stages: int = 4) -> float:
    """The ratio at a step: over ``warmup`` steps it falls to ``ratio`` by equal factors, in ``stages`` (section 3.3)."""
    if step >= warmup:
        return ratio
    return float(ratio ** ((step * stages // warmup + 1) / (stages + 1)))


def local_clip_norm(norm: float, num_replicas: int) -> float:
    """The bound for one replica's gradient before it is accumulated, so that the sum keeps the bound (section 3.2)."""
    return norm / math.sqrt(num_replicas)
