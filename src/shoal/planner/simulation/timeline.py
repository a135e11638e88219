"""A played step as files: a Chrome trace, which Perfetto opens like those of real runs, and a picture.

In a trace every lane is a process whose threads are its streams, with a counter of the bytes that it holds. Transfers can overlap
each other, which slices of one thread must not: they are asynchronous slices.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError
from shoal.planner.simulation.lanes import RankLane, Span, Stream, lanes_of
from shoal.planner.simulation.simulated import Simulated
from shoal.schedules.action import Kind
from shoal.schedules.svg import Box, Lane, cell_box, cell_legend, draw_lanes

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


def num_lanes(simulated: Simulated, *, expand: bool = False) -> int:
    """Lanes that a step has, all told: of ranks that are alike, or of every rank."""
    return simulated.plan.world_size if expand else simulated.num_groups * simulated.num_places


def trace_events(lanes: Iterable[RankLane]) -> Iterator[dict[str, Any]]:
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


def write_trace(path: Path, simulated: Simulated, *, expand: bool = False) -> int:
    """Write a trace of a step, and say how many lanes are in it.

    Raises:
        RunError: the disk refused.
    """
    lanes = list(lanes_of(simulated, expand=expand, most=simulated.plan.world_size if expand else MOST_LANES))
    try:
        with path.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(trace_events(lanes)):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
    except OSError as error:
        raise RunError(f"cannot write the trace {path}: {error.strerror}; name another file") from error
    return len(lanes)


def draw_step(simulated: Simulated, *, expand: bool = False) -> str:
    """A step as an SVG file: a row for each stream of each lane that has something on it."""
    lanes = sorted(lanes_of(simulated, expand=expand, most=MOST_LANES), key=lambda lane: lane.ranks)
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
