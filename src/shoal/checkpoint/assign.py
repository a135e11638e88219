"""Which rank writes which tensor. Pure, so that every rank comes to the same answer without asking."""

import heapq
from collections.abc import Mapping


def assign(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """The rank that writes each tensor, balanced by bytes.

    Largest first, each to the rank with the least so far (Graham, 1969: within 4/3 of the best balance). Equal loads go to the
    lower rank and equal sizes in the order of names, so the answer depends on nothing but the arguments.

    Args:
        sizes: bytes by tensor name.
        num_ranks: how many ranks hold the same tensors.
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners
