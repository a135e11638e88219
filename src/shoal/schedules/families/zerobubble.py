"""ZB-H1 and ZB-H2: 1F1B with the backward cut in two, so that weights' gradients fill the time in which ranks would wait.

The stage before waits only for the gradient of the input (I); that of the weights (W) can be put off. A rank that runs
``lead`` microbatches ahead does so with forwards before its first I, with W's that it puts off, or with both: the first rank
with forwards, the last with W's. Each rank then holds lead+1 microbatches, and the more it may hold the less it waits:

    ZB-H1   lead P-1    each rank holds what 1F1B's first does     the first rank waits (P-1)(F+I-W), from M=P on
    ZB-H2   lead 2P-2   about twice that                           the first rank waits (P-1)(F+I-2W), from M=2P-1 on

These are the waits between a rank's first cell and its last while W is no longer than F and than I; rank i has P-1-i in the
place of P-1, and 1F1B waits (P-1)(F+I+W). At F=I=W=1 no rank of H2 waits, yet both take 3M+P-1 from M=P on (2M+2P-1 for
fewer), the least that any order takes: H2 gains only where a rank may begin the next step while others are still in this one.
"""

from shoal.schedules.action import Action, Cell, Kind
from shoal.schedules.families.line import one_by_one
from shoal.schedules.family import Family, Size
from shoal.schedules.grid import Fold
from shoal.schedules.schedule import Row


def _lead(size: Size, per_rank: int) -> int:
    """Microbatches that a rank runs ahead; all but one where there are few, or the W's would all be left to the end."""
    return min(per_rank * (size.ranks - 1), size.microbatches - 1)


def _row(size: Size, rank: int, per_rank: int) -> Row:
    lead = _lead(size, per_rank)
    warm_up = min(lead, per_rank * (size.ranks - 1 - rank))
    put_off = lead - warm_up
    forwards, inputs, weights = (
        [Action(rank, kind, microbatch) for microbatch in range(size.microbatches)]
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    )
    cells: list[Cell] = []
    for (action,) in one_by_one(forwards, inputs, warm_up):
        cells.append((action,))
        if action.kind is Kind.INPUT and action.microbatch >= put_off:
            cells.append((weights[action.microbatch - put_off],))
    return (*cells, *((action,) for action in weights[size.microbatches - put_off :]))


def _rows(size: Size, per_rank: int) -> tuple[Row, ...]:
    return tuple(_row(size, rank, per_rank) for rank in range(size.ranks))


ZB_H1 = Family(
    name="zb-h1",
    summary="1F1B with weights' gradients put off: a third of the bubble for the same memory",
    source="Qi et al., 2023, arXiv 2401.10241, section 2.1",
    fold=Fold.LINE,
    rows=lambda size: _rows(size, 1),
    activations=lambda size, rank: _lead(size, 1) + 1,
)

ZB_H2 = Family(
    name="zb-h2",
    summary="weights' gradients put off further: no rank waits between its first cell and its last, for twice the memory",
    source="Qi et al., 2023, arXiv 2401.10241, section 2.2",
    fold=Fold.LINE,
    rows=lambda size: _rows(size, 2),
    activations=lambda size, rank: _lead(size, 2) + 1,
)
