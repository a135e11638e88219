"""How long a collective takes: rings with a latency per hop and a bandwidth per tier.

Formulas: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH": a ring moves
2 (n-1)/n of the buffer for an all-reduce and (n-1)/n for its two halves; a tree needs 2 log2(n) hops for small buffers, and the
quicker of the two is taken, as NCCL does.
"""

import math
from dataclasses import dataclass

from shoal.planner.hardware.devices import Cluster, Tier
from shoal.planner.hardware.software import Constants


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other: how many, how far apart in the order of ranks, and on what."""

    size: int
    stride: int
    """Places between neighbours: 1 for the innermost axis."""


@dataclass(frozen=True)
class Wire:
    """What a group's collective runs at."""

    size: int
    bandwidth: float
    """Bytes per second of one rank."""
    latency: float


def wire_of(group: Group, cluster: Cluster, constants: Constants) -> Wire:
    """The bandwidth and latency that a group gets.

    Where a group has several ranks in a node, its ring leaves the node once and has the links of all its ranks there for that.
    """
    inner = cluster.tiers[0]
    if group.size <= 1:
        return Wire(1, math.inf, 0.0)
    tier = _tier_of(group, cluster)
    if tier is inner:
        return Wire(group.size, inner.bandwidth_among(group.size) * constants.link, inner.latency)
    in_node = _in_node(group, inner)
    outer = tier.bandwidth * constants.network * in_node
    return Wire(group.size, min(outer, inner.bandwidth * constants.link) if in_node > 1 else outer, tier.latency)


def neighbour_wire(group: Group, cluster: Cluster, constants: Constants) -> Wire:
    """What the slowest pair of neighbours of a group gets: a pipeline goes at its pace, however near the others are."""
    if group.size <= 1:
        return Wire(1, math.inf, 0.0)
    tier = _tier_of(group, cluster)
    if tier is cluster.tiers[0]:
        return wire_of(Group(2, group.stride), cluster, constants)
    return Wire(2, tier.bandwidth * constants.network, tier.latency)


def _tier_of(group: Group, cluster: Cluster) -> Tier:
    """The tier that every group of this kind stays inside. They lie side by side in the order of ranks, so one that is small
    enough for a node still straddles two unless the node is a whole number of them."""
    if len(cluster.tiers) == 1:
        return cluster.tiers[0]
    block = group.size * group.stride
    return next((tier for tier in cluster.tiers if tier.devices % block == 0), cluster.tiers[-1])


def _in_node(group: Group, inner: Tier) -> int:
    """Ranks of a group in the node that has the fewest of them, which is where a ring has the fewest links to leave by."""
    return max(1, min(group.size, math.gcd(group.size * group.stride, inner.devices) // group.stride))


def all_to_all_wire(group: Group, cluster: Cluster, constants: Constants, *, copies: int = 1) -> Wire:
    """The same for an all-to-all, in which nothing is passed on: what is for other nodes leaves through each rank's own link.

    Both go on at once, so the slower of them sets the pace (NCCL sends to all peers side by side, with every device's own
    network card).

    Args:
        group: the ranks.
        cluster: where they are.
        constants: what they reach.
        copies: of every element, to ranks that are as good as random, of which a node gets one and passes it on (DeepSeek-V3,
            arXiv:2412.19437, section 3.2.2).
    """
    inner = cluster.tiers[0]
    tier = _tier_of(group, cluster)
    if group.size <= 1 or tier is inner:
        return wire_of(group, cluster, constants)
    in_node = _in_node(group, inner)
    # Shares of a rank's bytes, in parts of 1 / size, over the speed of the way that they take.
    near = (in_node - 1) / (inner.bandwidth * constants.link)
    num_nodes = group.size / in_node
    # Of k copies over n nodes, n (1 - (1 - 1/n)^k) nodes get one at least.
    once = num_nodes * (1 - (1 - 1 / num_nodes) ** copies) / copies
    far = once * (group.size - in_node) / (tier.bandwidth * constants.network)
    return Wire(group.size, (group.size - 1) / max(near, far), tier.latency)


def all_reduce(num_bytes: float, wire: Wire) -> float:
    """Seconds of a sum over all ranks of a group that all of them get."""
    if wire.size <= 1 or num_bytes <= 0:
        return 0.0
    share = (wire.size - 1) / wire.size
    ring = 2 * (wire.size - 1) * wire.latency + 2 * share * num_bytes / wire.bandwidth
    tree = 2 * math.ceil(math.log2(wire.size)) * wire.latency + 2 * num_bytes / wire.bandwidth
    return min(ring, tree)


def all_gather(num_bytes: float, wire: Wire, calls: int = 1) -> float:
    """Seconds until every rank has all of a buffer of which each had a part; a reduce-scatter takes the same.

    By recursive doubling, log2(n) hops (Thakur et al. 2005, section 4.1), for each of so many calls that move it in parts.
    """
    if wire.size <= 1 or num_bytes <= 0:
        return 0.0
    share = (wire.size - 1) / wire.size
    return calls * math.ceil(math.log2(wire.size)) * wire.latency + share * num_bytes / wire.bandwidth


def all_to_all(num_bytes: float, wire: Wire) -> float:
    """Seconds of an all-to-all in which each rank sends ``num_bytes`` in all."""
    if wire.size <= 1 or num_bytes <= 0:
        return 0.0
    return math.ceil(math.log2(wire.size)) * wire.latency + (wire.size - 1) / wire.size * num_bytes / wire.bandwidth


def send(num_bytes: float, wire: Wire) -> float:
    """Seconds from one rank to its neighbour."""
    return wire.latency + num_bytes / wire.bandwidth if num_bytes > 0 else 0.0
