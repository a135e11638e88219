"""Chimera: two pipelines in opposite directions over the same ranks, each in the other's bubbles.

At equal forwards and backwards time is cut into slots. A microbatch goes through the ranks without waiting, one slot per stage,
and the two directions use slots of different parity. So on every rank the forwards of one direction meet only the backwards of
the other, and on all ranks in the same turn: who has which turn is decided once, for the whole pipeline.

The paper joins units of P microbatches (half of them in each direction). What is left when M is no multiple of P it appends as a
smaller unit, with a bubble; here it is let into the last unit, so every M >= P ends after 2M+P-2 slots. No schedule can undercut
that: the first and the last P/2-1 slots of the middle ranks are idle whatever they do. With M < P the end is at 2P+M-2.
"""

from collections.abc import Iterator

from shoal.schedules.action import Action, Kind
from shoal.schedules.family import Family, Size
from shoal.schedules.grid import Fold, Grid
from shoal.schedules.schedule import Row


def _turns(each: int, half: int) -> tuple[list[int], list[int]]:
    """The turns of the forwards, and those of the backwards that meet them on the same rank, of ``each`` microbatches.

    A backward is half the ranks behind its forward or more, because the microbatch goes to the end and comes back::

        whole units     F F F B B B  F F F B B B
        one left over   F F F B B B  F F F B F B B B
    """
    if each < half:
        return list(range(each)), list(range(half, half + each))
    units, rest = divmod(each, half)
    order = ("F" * half + "B" * half) * (units - 1) + "F" * half + "B" * rest + "F" * rest + "B" * half
    forwards, backwards = ([turn for turn, kind in enumerate(order) if kind == wanted] for wanted in "FB")
    return forwards, backwards


def _rows(size: Size) -> tuple[Row, ...]:
    ranks, each = size.ranks, size.microbatches // 2
    grid = Grid(Fold.CROSS, ranks, size.stages, size.microbatches)
    forwards, backwards = _turns(each, ranks // 2)
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for microbatch in range(size.microbatches):
        forward, backward = forwards[microbatch % each], backwards[microbatch % each]
        for stage in range(ranks):
            slots[grid.rank_of(stage, microbatch)] += [
                (2 * forward + stage, Action(stage, Kind.FORWARD, microbatch)),
                (2 * backward + ranks - 1 - stage, Action(stage, Kind.BACKWARD, microbatch)),
            ]
    return tuple(tuple((action,) for _, action in sorted(row)) for row in slots)


def _activations(size: Size, rank: int) -> int:
    """From P/2+1 on the outer ranks to P on the middle ones, as in the paper; P where a rest is let into the last unit."""
    ranks, each = size.ranks, size.microbatches // 2
    if size.microbatches > ranks and size.microbatches % ranks:
        return ranks
    from_end = min(rank, ranks - 1 - rank)
    return min(each, ranks // 2) + min(each, from_end + 1)


def odd_numbers(size: Size) -> Iterator[str]:
    """What two directions cannot share evenly."""
    if size.ranks % 2:
        yield f"its two directions need an even number of ranks, and {size.ranks} is odd; set pp to {size.ranks + 1}"
    if size.microbatches % 2:
        yield (
            f"each direction takes half of the microbatches, and {size.microbatches} is odd; "
            f"set microbatches to {size.microbatches + 1}"
        )


CHIMERA = Family(
    name="chimera",
    summary="two 1f1b pipelines in opposite directions, each in the other's bubbles; two copies of the weights",
    source="Li and Hoefler, 2021, arXiv 2107.06925",
    fold=Fold.CROSS,
    rows=_rows,
    activations=_activations,
    problems=odd_numbers,
)
