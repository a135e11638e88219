"""What each rank of a played step does when, stream by stream: what traces and pictures are made from.

Compute has a stream of its own, and so have transfers between stages, sums over ``dp`` and ZeRO's gathers: they go on beside it.
Communication inside passes (``tp``, ``cp``, ``ep``) has its streams too, and nothing is computed meanwhile: a cell's time is what
it computes, and then what it waits for. In truth a pass waits in every layer; only the sum of these waits is known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.planner.simulation.cellprices import COMPUTE, UPDATE
from shoal.planner.simulation.holding import Moment, memory_timeline
from shoal.planner.simulation.simulated import Simulated
from shoal.schedules.action import Cell, Kind
from shoal.schedules.draw import short


class Stream(StrEnum):
    """What goes on one after another."""

    COMPUTE = "compute"
    TENSOR = "tp"
    CONTEXT = "cp"
    EXPERT = "ep"
    PIPELINE = "pp"
    DATA = "dp"
    ZERO = "zero"


@dataclass(frozen=True)
class Span:
    """Something that takes time on a stream."""

    stream: Stream
    name: str
    start: float
    end: float
    cell: Cell | None = None


@dataclass(frozen=True)
class RankLane:
    """Ranks that do the same: one pipeline place of replicas that are alike."""

    place: int
    group: int
    ranks: tuple[int, ...]
    spans: tuple[Span, ...]
    memory: tuple[Moment, ...]
    """Bytes held, where they were given."""

    @property
    def label(self) -> str:
        """Which ranks these are, in few letters."""
        return f"rank {say_ranks(self.ranks)}" if len(self.ranks) == 1 else f"ranks {say_ranks(self.ranks)}"


def lanes_of(simulated: Simulated, *, expand: bool = False, most: int = 10_000) -> Iterator[RankLane]:
    """The lanes of a step, pipeline place by place: one for ranks that are alike, or one for each rank.

    Args:
        simulated: the step.
        expand: a lane for every rank.
        most: lanes at most. Where there are more, the replicas that all wait for come first and the rest in their order.
    """
    groups = [simulated.tail.decides[1]]
    groups += [group for group in range(simulated.num_groups) if group != groups[0]]
    left = most
    for group in groups:
        if left <= 0:
            return
        cells = _timed_cells(simulated, group)
        for place, spans in enumerate(_spans(simulated, group, cells)):
            ranks = simulated.ranks(place, group)
            memory = _memory(simulated, place, cells[place])
            for members in [[rank] for rank in ranks] if expand else [ranks]:
                if left > 0:
                    yield RankLane(place, group, tuple(members), tuple(spans), memory)
                left -= 1


def say_ranks(ranks: Sequence[int], most: int = 3) -> str:
    """``0-7, 16-23``; the rest as dots."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    return ", ".join([*shown, *(["..."] if len(runs) > most else [])])


_TimedCell = tuple[int, float, float]
"""The number of a cell in the order of work, its start and its end."""


def _timed_cells(simulated: Simulated, group: int) -> list[list[_TimedCell]]:
    """By pipeline place."""
    starts, ends = simulated.times(group)
    return [[(cell, float(starts[cell]), float(ends[cell])) for cell in row] for row in simulated.order.rows]


def _spans(simulated: Simulated, group: int, cells: Sequence[Sequence[_TimedCell]]) -> list[list[Span]]:
    """By pipeline place."""
    order, found = simulated.order, []
    ends = {cell: end for row in cells for cell, _, end in row}
    sent: list[list[Span]] = [[] for _ in cells]
    for step in order.steps:
        for need in step.needs:
            source = order.steps[need.cell].place
            seconds = simulated.parts.delay * float(simulated.folded.links[source, group])
            if need.is_far and seconds:
                at = ends[need.cell]
                sent[source].append(Span(Stream.PIPELINE, f"for {short(step.cell)}", at, at + seconds))
    for place, row in enumerate(cells):
        spans = [span for cell in row for span in _cell(simulated, group, *cell)]
        spans += [*sent[place], *_gathers(simulated, row), *_after(simulated, place, group)]
        # By stream and time: what reads them need not sort.
        found.append(sorted(spans, key=lambda span: (list(Stream).index(span.stream), span.start, span.end)))
    return found


def _cell(simulated: Simulated, group: int, number: int, start: float, end: float) -> Iterator[Span]:
    """What a cell computes, and then its communication that nothing hides."""
    cell = simulated.order.steps[number].cell
    talk = [piece for piece in simulated.pieces(number, group, start, end) if piece.what not in (COMPUTE, UPDATE)]
    yield Span(Stream.COMPUTE, short(cell), start, talk[0].start if talk else end, cell)
    for piece in talk:
        if piece.end > piece.start:
            yield Span(Stream(piece.what), f"in {short(cell)}", piece.start, piece.end)


def _after(simulated: Simulated, place: int, group: int) -> Iterator[Span]:
    """The sum, the update and what follows it."""
    tail, parts = simulated.tail, simulated.parts
    if simulated.flows:
        return
    pieces = (
        (Stream.DATA, "reduce", max(0.0, tail.reduces[place][0]), tail.reduces[place][1]),
        (Stream.COMPUTE, "update", tail.updated_from, tail.updates[place][group]),
        (Stream.ZERO, "gather", *tail.gathers[place]),
        (Stream.COMPUTE, "fixed", tail.end - parts.fixed, tail.end),
    )
    for stream, name, start, end in pieces:
        if end > start:
            yield Span(stream, name, start, end)


def _gathers(simulated: Simulated, cells: Sequence[_TimedCell]) -> Iterator[Span]:
    """What goes on of gathers before and beside the cells of a rank."""
    hidden = min(simulated.parts.gather_hidden, simulated.parts.gather)
    begin = simulated.tail.begin
    if begin:
        yield Span(Stream.ZERO, "gather", 0.0, begin)
    if hidden <= 0 or simulated.flows:
        return
    if simulated.plan.zero < 3:
        # What the last update changed arrives while the first passes go on.
        yield Span(Stream.ZERO, "gather", begin, min(begin + hidden, cells[-1][2]))
        return
    # Every pass gathers its stage's weights while the one before it computes; a weight's gradient alone needs none.
    steps = simulated.order.steps
    passes = [each for each in cells if any(action.kind is not Kind.WEIGHT for action in steps[each[0]].cell)]
    for _, start, until in passes:
        end = min(until, start + hidden / len(passes))
        if end > start:
            yield Span(Stream.ZERO, "gather", start, end)


def _memory(simulated: Simulated, place: int, cells: Sequence[_TimedCell]) -> tuple[Moment, ...]:
    if simulated.needed is None:
        return ()
    spans = [(start, end) for _, start, end in cells]
    return memory_timeline(simulated.order.schedule, place, spans, simulated.needed)
