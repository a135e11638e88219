"""Two directions at once: Chimera, DualPipe and DualPipeV.

Chimera: two pipelines in opposite directions over the same ranks, each in the other's bubbles.

At equal forwards and backwards time is cut into slots. A microbatch goes through the ranks without waiting, one slot per stage,
and the two directions use slots of different parity. So on every rank the forwards of one direction meet only the backwards of
the other, and on all ranks in the same turn: who has which turn is decided once, for the whole pipeline.

The paper joins units of P microbatches (half of them in each direction). What is left when M is no multiple of P it appends as
a smaller unit, with a bubble; here it is let into the last unit, so every M >= P ends after 2M+P-2 slots. No schedule can
undercut that: the first and the last P/2-1 slots of the middle ranks are idle whatever they do. With M < P the end is at
2P+M-2.

DualPipe and DualPipeV: a forward of one half of the model overlaps with a backward of the other.

Microbatches pass each rank two ways: way 0 is the one by which they come soon, way 1 that by which they come late. In DualPipe
(DeepSeek-V3 report) these are the two directions; the second half of the ranks is the mirror of the first. DualPipeV
(DeepSeek's DualPipe repository) keeps one half of the ranks and sends each microbatch down and back up, so that no weights are
held twice. Either way a rank has a place between the outside, where microbatches enter, and the inside, where ways 0 and 1
meet.

The sources give a bubble of (S/2-1)(F&B + B - 3W) for S stages, where F&B is what an overlapped pair takes and B = I + W. By
``pricing`` that is exact when F = I >= W and a bound when F and W are at most I. When F >= I >= W it is (S/2-1)(F&B + F - 2W).

The sources ask for at least 2P microbatches. With fewer the outer ranks have no main phase, and what the other phases would do
for microbatches that are not there is left out. The bubble may then be longer than the formula.
"""

from collections import Counter, deque
from collections.abc import Iterator

from shoal.schedules.families.family import Family, Size
from shoal.schedules.schedule import Action, Cell, Fold, Grid, Kind, Row


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
