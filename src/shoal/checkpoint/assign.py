"""Which rank writes which tensor, or which piece of one. Pure, so that every rank comes to the same answer without asking."""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)


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


def assign_held(sizes: Mapping[Unit, int], holders: Mapping[Unit, Sequence[int]], num_ranks: int) -> dict[Unit, int]:
    """The same when not every rank holds everything: each unit goes to one of its holders.

    What few ranks hold is dealt out first, because what many hold can still even out the loads.

    Args:
        sizes: bytes by unit; equal sizes are dealt out in the order of this mapping.
        holders: the ranks that hold each unit, ascending, at least one.
        num_ranks: how many ranks there are.
    """
    loads = [0] * num_ranks
    owners = {}
    for unit in sorted(sizes, key=lambda unit: (len(holders[unit]), -sizes[unit])):
        rank = min(holders[unit], key=lambda rank: (loads[rank], rank))
        owners[unit] = rank
        loads[rank] += sizes[unit]
    return owners
