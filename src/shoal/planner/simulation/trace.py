"""What each rank of a played step does when, stream by stream: what traces and pictures are made from.

Compute has a stream of its own, and so have transfers between stages, sums over ``dp`` and ZeRO's gathers: they go on beside
it. Communication inside passes (``tp``, ``cp``, ``ep``) has its streams too, and nothing is computed meanwhile: a cell's time
is what it computes, and then what it waits for. In truth a pass waits in every layer; only the sum of these waits is known.

The files are a Chrome trace, which Perfetto opens like those of real runs, and a picture. In a trace every lane is a process
whose threads are its streams, with a counter of the bytes that it holds. Transfers can overlap each other, which slices of one
thread must not: they are asynchronous slices.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError
from shoal.planner.simulation.cells import COMPUTE, UPDATE, Moment, memory_timeline
from shoal.planner.simulation.result import SimulatedStep
from shoal.schedules.draw import Box, Lane, cell_box, cell_legend, draw_lanes, short
from shoal.schedules.schedule import Cell, Kind


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
class RankStreams:
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
        return f"rank {format_ranks(self.ranks)}" if len(self.ranks) == 1 else f"ranks {format_ranks(self.ranks)}"


def streams_of(simulated: SimulatedStep, *, expand: bool = False, most: int = 10_000) -> Iterator[RankStreams]:
    """The lanes of a step, pipeline place by place: one for ranks that are alike, or one for each rank.

    Args:
        simulated: the step.
        expand: a lane for every rank.
        most: lanes at most. Where there are more, the replicas that all wait for come first and the rest in their order.
    """
    groups = [simulated.ends.decides[1]]
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
                    yield RankStreams(place, group, tuple(members), tuple(spans), memory)
                left -= 1


def format_ranks(ranks: Sequence[int], most: int = 3) -> str:
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


def _timed_cells(simulated: SimulatedStep, group: int) -> list[list[_TimedCell]]:
    """By pipeline place."""
    starts, ends = simulated.times(group)
    return [[(cell, float(starts[cell]), float(ends[cell])) for cell in row] for row in simulated.order.rows]


def _spans(simulated: SimulatedStep, group: int, cells: Sequence[Sequence[_TimedCell]]) -> list[list[Span]]:
    """By pipeline place."""
    order, found = simulated.order, []
    ends = {cell: end for row in cells for cell, _, end in row}
    sent: list[list[Span]] = [[] for _ in cells]
    for each in order.cells:
        for need in each.needs:
            source = order.cells[need.cell].rank
            seconds = simulated.parts.delay * float(simulated.folded.links[source, group])
            if need.is_far and seconds:
                at = ends[need.cell]
                sent[source].append(Span(Stream.PIPELINE, f"for {short(each.cell)}", at, at + seconds))
    for place, row in enumerate(cells):
        spans = [span for cell in row for span in _cell(simulated, group, *cell)]
        spans += [*sent[place], *_gathers(simulated, row), *_after(simulated, place, group)]
        # By stream and time: what reads them need not sort.
        found.append(sorted(spans, key=lambda span: (list(Stream).index(span.stream), span.start, span.end)))
    return found


def _cell(simulated: SimulatedStep, group: int, number: int, start: float, end: float) -> Iterator[Span]:
    """What a cell computes, and then its communication that nothing hides."""
    cell = simulated.order.cells[number].cell
    talk = [piece for piece in simulated.pieces(number, group, start, end) if piece.what not in (COMPUTE, UPDATE)]
    yield Span(Stream.COMPUTE, short(cell), start, talk[0].start if talk else end, cell)
    for piece in talk:
        if piece.end > piece.start:
            yield Span(Stream(piece.what), f"in {short(cell)}", piece.start, piece.end)


def _after(simulated: SimulatedStep, place: int, group: int) -> Iterator[Span]:
    """The sum, the update and what follows it."""
    ends, parts = simulated.ends, simulated.parts
    if simulated.is_asynchronous:
        return
    pieces = (
        (Stream.DATA, "reduce", max(0.0, ends.reduces[place][0]), ends.reduces[place][1]),
        (Stream.COMPUTE, "update", ends.updated_from, ends.updates[place][group]),
        (Stream.ZERO, "gather", *ends.gathers[place]),
        (Stream.COMPUTE, "fixed", ends.end - parts.fixed, ends.end),
    )
    for stream, name, start, end in pieces:
        if end > start:
            yield Span(stream, name, start, end)


def _gathers(simulated: SimulatedStep, cells: Sequence[_TimedCell]) -> Iterator[Span]:
    """What goes on of gathers before and beside the cells of a rank."""
    hidden = min(simulated.parts.gather_hidden, simulated.parts.gather)
    begin = simulated.ends.begin
    if begin:
        yield Span(Stream.ZERO, "gather", 0.0, begin)
    if hidden <= 0 or simulated.is_asynchronous:
        return
    if simulated.plan.zero < 3:
        # What the last update changed arrives while the first passes go on.
        yield Span(Stream.ZERO, "gather", begin, min(begin + hidden, cells[-1][2]))
        return
    # Every pass gathers its stage's weights while the one before it computes; a weight's gradient alone needs none.
    known = simulated.order.cells
    passes = [each for each in cells if any(action.kind is not Kind.WEIGHT for action in known[each[0]].cell)]
    for _, start, until in passes:
        end = min(until, start + hidden / len(passes))
        if end > start:
            yield Span(Stream.ZERO, "gather", start, end)


def _memory(simulated: SimulatedStep, place: int, cells: Sequence[_TimedCell]) -> tuple[Moment, ...]:
    if simulated.needed is None:
        return ()
    spans = [(start, end) for _, start, end in cells]
    return memory_timeline(simulated.order.schedule, place, spans, simulated.needed)


MOST_LANES = 64
"""Lanes in a picture, and in a trace when nobody asks for every rank."""
_MICRO = 1e6
_MOST_PIXELS = 20_000.0
_COLOURS = {
    "update": ("#c2a5cf", "the update"),
    "fixed": ("#d9d9d9", "what every step takes"),
    Stream.TENSOR: ("#fccde5", "tp: in a pass"),
    Stream.CONTEXT: ("#bebada", "cp: in a pass"),
    Stream.EXPERT: ("#ccebc5", "ep: in a pass"),
    Stream.PIPELINE: ("#ffffb3", "pp: to another stage"),
    Stream.DATA: ("#80b1d3", "dp: sum of gradients"),
    Stream.ZERO: ("#b3de69", "zero: gather of weights"),
}


def num_lanes(simulated: SimulatedStep, *, expand: bool = False) -> int:
    """Lanes that a step has, all told: of ranks that are alike, or of every rank."""
    return simulated.plan.world_size if expand else simulated.num_groups * simulated.num_places


def trace_events(lanes: Iterable[RankStreams]) -> Iterator[dict[str, Any]]:
    """The events of a trace, in the format of chrome://tracing."""
    for lane in lanes:
        pid = lane.ranks[0]
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{lane.label} (pp {lane.place})"}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        used = {span.stream for span in lane.spans}
        for tid, stream in ((tid, stream) for tid, stream in enumerate(Stream) if stream in used):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": stream.value}}
        for number, span in enumerate(lane.spans):
            yield from _slices(span, pid=pid, number=number)
        for moment, held in lane.memory:
            yield {"ph": "C", "pid": pid, "name": "memory", "ts": moment * _MICRO, "args": {"bytes": held}}


def _slices(span: Span, *, pid: int, number: int) -> Iterator[dict[str, Any]]:
    shared = {"name": span.name, "cat": span.stream.value, "pid": pid, "tid": list(Stream).index(span.stream)}
    if span.stream is Stream.PIPELINE:
        # An id is of its process: two lanes may use the same.
        yield {**shared, "ph": "b", "id2": {"local": hex(number)}, "ts": span.start * _MICRO}
        yield {**shared, "ph": "e", "id2": {"local": hex(number)}, "ts": span.end * _MICRO}
        return
    extra = [{"stage": action.stage, "microbatch": action.microbatch} for action in span.cell or ()]
    arguments = {"args": extra[0] if len(extra) == 1 else {"actions": extra}} if extra else {}
    yield {**shared, "ph": "X", "ts": span.start * _MICRO, "dur": (span.end - span.start) * _MICRO, **arguments}


def write_trace(path: Path, simulated: SimulatedStep, *, expand: bool = False) -> int:
    """Write a trace of a step, and say how many lanes are in it.

    Raises:
        RunError: the disk refused.
    """
    lanes = list(streams_of(simulated, expand=expand, most=simulated.plan.world_size if expand else MOST_LANES))
    try:
        with path.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(trace_events(lanes)):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
    except OSError as error:
        raise RunError(f"cannot write the trace {path}: {error.strerror}; name another file") from error
    return len(lanes)


def draw_step(simulated: SimulatedStep, *, expand: bool = False) -> str:
    """A step as an SVG file: a row for each stream of each lane that has something on it."""
    lanes = sorted(streams_of(simulated, expand=expand, most=MOST_LANES), key=lambda lane: lane.ranks)
    rows, kinds, others = [], set[Kind](), set[str]()
    for lane in lanes:
        for stream in Stream:
            spans = [span for span in lane.spans if span.stream is stream]
            if spans:
                rows.append(Lane(f"{lane.label} {stream.value}", tuple(map(_box, spans))))
            for span in spans:
                kinds |= {action.kind for action in span.cell or ()}
                others |= {_key(span)} if span.cell is None else set()
    legend = [cell_legend(kind) for kind in Kind if kind in kinds]
    legend += [entry for key, entry in _COLOURS.items() if key in others]
    title = (
        f"{simulated.plan}: a step of {simulated.step_seconds:.4g} s on {simulated.plan.world_size} ranks, "
        f"{simulated.bubble:.1%} idle"
    )
    return draw_lanes(title, rows, legend=legend, most_pixels=_MOST_PIXELS)


def _key(span: Span) -> str:
    return span.name if span.stream is Stream.COMPUTE else span.stream.value


def _box(span: Span) -> Box:
    if span.cell is not None:
        return cell_box(span.cell, (span.start, span.end), seconds=True)
    colour, _ = _COLOURS[_key(span)]
    return Box(span.start, span.end, span.name, f"{span.name}: {span.start:g} to {span.end:g} s", (colour,))
