"""How many ranks have the same weights, and what one rank has of a layer's: for dense layers and for experts.

Ranks that share a sequence (``cp``) have the same weights as replicas have. Experts have groups of their own: ``ep`` ranks share
them, taken from replicas, and from tensor-parallel ranks too where a software leaves an expert's matrices whole (Liu et al. 2025,
arXiv:2504.14960, section 3.2, "parallel folding").
"""

import math
from dataclasses import dataclass

from shoal.core.plan import Plan
from shoal.costs.layers import Layer
from shoal.planner.stacks import Software


@dataclass(frozen=True)
class Sharing:
    """Of a plan under a software."""

    dense_copies: int
    """Ranks that have the same part of a dense layer, and sum its gradient."""
    expert_copies: int
    """The same of an expert."""
    dense_shards: int
    """Parts that ZeRO makes of what those ranks have in common."""
    expert_shards: int
    expert_split: int
    """Tensor-parallel ranks that share each matrix of an expert."""


def share_weights(plan: Plan, software: Software) -> Sharing:
    """Who has the same weights under a plan."""
    dp, cp, ep = plan.dp or 1, plan.cp, plan.ep
    split = plan.tp if software.splits_experts or ep == 1 else 1
    copies = max(1, dp * cp * plan.tp // (ep * split))
    dense_shards, expert_shards = (dp * cp, copies) if software.shards_context else (dp, max(1, copies // cp))
    if software.shard_group:
        # Groups hold the same: a group that does not divide them would be another plan. Experts have groups of their own anyway.
        dense_shards = math.gcd(dense_shards, software.shard_group)
    return Sharing(dp * cp, copies, dense_shards, expert_shards, split)


def dense_weights(layer: Layer, plan: Plan) -> float:
    """Elements of a layer on one rank, experts left out."""
    return layer.whole_weights + layer.split_weights / plan.tp


def expert_weights(layer: Layer, plan: Plan, sharing: Sharing) -> float:
    """Elements of a layer's experts on one rank."""
    return layer.expert_weights / (plan.ep * (sharing.expert_split if layer.cuts_experts else 1))


def layer_weights(layer: Layer, plan: Plan, software: Software) -> float:
    """Elements of a layer on one rank."""
    return dense_weights(layer, plan) + expert_weights(layer, plan, share_weights(plan, software))
