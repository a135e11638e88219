"""One stage per rank: GPipe and 1F1B."""

from shoal.schedules.action import Action, Cell, Kind
from shoal.schedules.family import Family, Size
from shoal.schedules.grid import Fold
from shoal.schedules.schedule import Row


def one_by_one(forwards: list[Action], backwards: list[Action], warm_up: int) -> Row:
    """``warm_up`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    cells: list[Cell] = [(action,) for action in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        cells += [(forward,), (backward,)]
    return (*cells, *((action,) for action in backwards[max(0, len(forwards) - warm_up) :]))


def line_row(size: Size, rank: int, warm_up: int) -> Row:
    """A rank's row when its stage is its number."""
    forwards, backwards = (
        [Action(rank, kind, microbatch) for microbatch in range(size.microbatches)]
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    return one_by_one(forwards, backwards, warm_up)


def one_f_one_b_rows(size: Size) -> tuple[Row, ...]:
    """As few forwards ahead as keep the last rank busy: rank i holds P-i microbatches."""
    return tuple(line_row(size, rank, min(size.microbatches, size.ranks - 1 - rank)) for rank in range(size.ranks))


def one_f_one_b_activations(size: Size, rank: int) -> int:
    """Microbatches between rank i and the end of the pipeline."""
    return min(size.microbatches, size.ranks - rank)


GPIPE = Family(
    name="gpipe",
    summary="all forwards, then all backwards",
    source="Huang et al., 2019, arXiv 1811.06965",
    fold=Fold.LINE,
    rows=lambda size: tuple(line_row(size, rank, size.microbatches) for rank in range(size.ranks)),
    activations=lambda size, rank: size.microbatches,
)

ONE_F_ONE_B = Family(
    name="1f1b",
    summary="a backward as soon as it can be, so that few activations are held",
    source="Narayanan et al., 2021, arXiv 2104.04473, figure 3",
    fold=Fold.LINE,
    rows=one_f_one_b_rows,
    activations=one_f_one_b_activations,
)
