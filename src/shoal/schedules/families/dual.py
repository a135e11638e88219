"""DualPipe and DualPipeV: a forward of one half of the model overlaps with a backward of the other.

Microbatches pass each rank two ways: way 0 is the one by which they come soon, way 1 that by which they come late. In DualPipe
(DeepSeek-V3 report) these are the two directions; the second half of the ranks is the mirror of the first. DualPipeV (DeepSeek's
DualPipe repository) keeps one half of the ranks and sends each microbatch down and back up, so that no weights are held twice.
Either way a rank has a place between the outside, where microbatches enter, and the inside, where ways 0 and 1 meet.

The sources give a bubble of (S/2-1)(F&B + B - 3W) for S stages, where F&B is what an overlapped pair takes and B = I + W. By
``pricing`` that is exact when F = I >= W and a bound when F and W are at most I. When F >= I >= W it is (S/2-1)(F&B + F - 2W).

The sources ask for at least 2P microbatches. With fewer the outer ranks have no main phase, and what the other phases would do
for microbatches that are not there is left out. The bubble may then be longer than the formula.
"""

from collections import Counter, deque

from shoal.schedules.action import Action, Cell, Kind
from shoal.schedules.families.chimera import odd_numbers
from shoal.schedules.family import Family, Size
from shoal.schedules.grid import Fold
from shoal.schedules.schedule import Row

Step = tuple[str, ...]
"""Kinds with their ways, such as F0; two that overlap; or W, which is of the backward that has waited longest for it."""
Way = tuple[int, int]
"""The stage of a rank on one way, and the first microbatch that goes it."""


def _steps(depth: int, place: int, each: int) -> list[Step]:
    """What the rank at a place does, 0 being outside of ``depth`` ranks, when ``each`` microbatches go each way.

    Eight phases: the first three fill the pipeline, the last four empty it.
    """
    # Ranks further in, and the others with this one.
    inside, outside = depth - 1 - place, place + 1
    main: list[Step] = [("F0", "B1"), ("F1", "B0")] * max(0, each - 2 * depth + outside)
    if not inside:
        # As in the source: alone, this forward goes on its way at once, which shortens the step when sending takes time.
        main[:1] = [("F0",), ("B1",)]
    last: list[Step] = [("B1",), ("B0",)] * outside
    # From here on W fills the time in which a rank would wait for gradients.
    last[outside:] = [("I1",) if step == ("B1",) else ("I0",) for step in last[outside:]]
    return [
        *[("F0",)] * (2 * inside),
        *[("F0",), ("F1",)] * outside,
        *[("I1",), ("W",), ("F1",)] * inside,
        *main,
        *[("B1",), ("F1", "B0")] * inside,
        *last,
        *[("W",), ("I0",)] * inside,
        *[("W",)] * outside,
    ]


def _row(depth: int, place: int, each: int, ways: tuple[Way, Way]) -> Row:
    """The steps with stages and microbatches; each way takes its microbatches in order."""
    turn: Counter[tuple[bool, int]] = Counter()
    halved: deque[tuple[int, int]] = deque()
    cells: list[Cell] = []
    # At least one main round on the innermost rank: with none, few microbatches take longer.
    for step in _steps(depth, place, max(each, depth + 1)):
        cell = []
        for text in step:
            kind = Kind(text[0])
            if kind is Kind.WEIGHT:
                way, number = halved.popleft()
            else:
                way = int(text[1])
                number = turn[kind is Kind.FORWARD, way]
                turn[kind is Kind.FORWARD, way] += 1
            if kind is Kind.INPUT:
                halved.append((way, number))
            stage, first = ways[way]
            if number < each:
                cell.append(Action(stage, kind, first + number))
        if cell:
            cells.append(tuple(cell))
    return tuple(cells)


def _dualpipe_rows(size: Size) -> tuple[Row, ...]:
    depth, each = size.ranks // 2, size.microbatches // 2
    rows = []
    for rank in range(size.ranks):
        mirror = size.ranks - 1 - rank
        down, up = (rank, 0), (mirror, each)
        rows.append(_row(depth, min(rank, mirror), each, (down, up) if rank < depth else (up, down)))
    return tuple(rows)


def _dualpipev_rows(size: Size) -> tuple[Row, ...]:
    depth, each = size.ranks, size.microbatches
    return tuple(_row(depth, rank, each, ((rank, 0), (2 * depth - 1 - rank, 0))) for rank in range(depth))


DUALPIPE = Family(
    name="dualpipe",
    summary="two directions, and a forward of one overlaps with a backward of the other; two copies of the weights",
    source="DeepSeek-AI, 2024, arXiv 2412.19437, section 3.2.1",
    fold=Fold.CROSS,
    rows=_dualpipe_rows,
    activations=lambda size, rank: min(size.microbatches, size.ranks + 1),
    problems=odd_numbers,
)

DUALPIPEV = Family(
    name="dualpipev",
    summary="dualpipe cut in half: down the ranks and back, with one copy of the weights",
    source="DeepSeek-AI, 2025, github.com/deepseek-ai/DualPipe",
    fold=Fold.VEE,
    rows=_dualpipev_rows,
    activations=lambda size, rank: min(2 * size.microbatches, 2 * size.ranks + 1),
    chunks=2,
)
