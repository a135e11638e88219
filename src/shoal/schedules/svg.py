"""A schedule in time as a picture: a row per rank, a box per cell. One file with nothing outside it: no scripts, no fonts."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.schedules.draw import short
from shoal.schedules.player import Span, Timeline
from shoal.schedules.schedule import Action, Cell, Kind, Schedule

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward, input gradient",
    Kind.WEIGHT: "backward, weight gradient",
}
# Of unlike lightness, so that they differ in grey too; the letter in each box says the same without any colour.
_COLOURS = {Kind.FORWARD: "#9ecae1", Kind.BACKWARD: "#f4a582", Kind.INPUT: "#fddbc7", Kind.WEIGHT: "#e6f5c9"}

_LETTER = 7
"""Width of a letter of 11 pixels, and a little air."""
_LABEL = 64
_ROW = 26
_BOX = 22
_TOP = 28
_LEGEND = 34
_TIMES_AS_WIDE = 8
"""The shortest cell gets room for its name unless the longest is so many times as long."""


@dataclass(frozen=True)
class Box:
    """Something that takes time: colours from top to bottom, a name where there is room, a tip."""

    start: float
    end: float
    name: str
    tip: str
    colours: tuple[str, ...]


@dataclass(frozen=True)
class Lane:
    """A row of the picture."""

    label: str
    boxes: tuple[Box, ...]


def draw_svg(schedule: Schedule, timeline: Timeline) -> str:
    """An SVG file; the tip on a box says stage, microbatch, start and end."""
    kinds = [
        kind for kind in Kind if any(kind is action.kind for row in schedule.rows for cell in row for action in cell)
    ]
    # XML has no place for control characters, which the name of a file may hold.
    name = "".join(letter if letter.isprintable() else "?" for letter in schedule.name)
    lanes = [
        Lane(f"rank {rank}", tuple(cell_box(cell, span) for cell, span in zip(row, spans, strict=True)))
        for rank, (row, spans) in enumerate(zip(schedule.rows, timeline.spans, strict=True))
    ]
    title = f"{name}: {schedule.grid}, {timeline.bubble:.1%} idle"
    return draw_lanes(title, lanes, legend=[cell_legend(kind) for kind in kinds])


def draw_lanes(
    title: str, lanes: Sequence[Lane], *, legend: Sequence[tuple[str, str]], most_pixels: float = 1e9
) -> str:
    """Rows of boxes in time, to scale.

    Args:
        title: above them.
        lanes: the rows, from top to bottom.
        legend: colours and what they mean.
        most_pixels: the widest that the rows may be.
    """
    label = max([_LABEL, *(16 + _LETTER * len(lane.label) for lane in lanes)])
    until = max((box.end for lane in lanes for box in lane.boxes), default=0.0)
    scale = _pixels_per_time([box for lane in lanes for box in lane.boxes], until, most_pixels)
    width = max(
        label + until * scale + 8, label + sum(_legend_width(words) for _, words in legend), 8 + _LETTER * len(title)
    )
    height = _TOP + _ROW * len(lanes) + _LEGEND
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_number(width)}" height="{height}" '
        f'viewBox="0 0 {_number(width)} {height}" font-family="monospace" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_number(width)}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="12">{escape(title)}</text>',
    ]
    for index, lane in enumerate(lanes):
        top = _TOP + _ROW * index
        lines.append(f'<text x="8" y="{top + 15}">{escape(lane.label)}</text>')
        lines += [_draw_box(box, label, top, scale) for box in lane.boxes]
    return "\n".join([*lines, *_legend(legend, label, height - 12), "</svg>"]) + "\n"


def cell_box(cell: Cell, span: Span, *, seconds: bool = False) -> Box:
    """The box of a cell; two actions that overlap share its height."""
    start, end = span
    unit = " s" if seconds else ""
    tip = f"{' and '.join(map(_say, cell))}: {start:g} to {end:g}{unit}"
    return Box(start, end, short(cell), tip, tuple(_COLOURS[action.kind] for action in cell))


def cell_legend(kind: Kind) -> tuple[str, str]:
    """The colour of a kind of action, and its words."""
    return _COLOURS[kind], f"{kind} {_WORDS[kind]}"


def _pixels_per_time(boxes: Sequence[Box], until: float, most: float) -> float:
    lengths = [box.end - box.start for box in boxes if box.end > box.start]
    if not lengths:
        return 1.0
    name = _LETTER * max(len(box.name) for box in boxes) + 6
    named = name / max(min(lengths), max(lengths) / _TIMES_AS_WIDE)
    # Waits that dwarf the work must not make a picture of a mile.
    return min(named, _TIMES_AS_WIDE * name * len(lengths) / until, most / until)


def _draw_box(box: Box, label: int, top: int, scale: float) -> str:
    left, width = label + box.start * scale, (box.end - box.start) * scale
    part = _BOX / len(box.colours)
    shapes = [
        f'<rect x="{_number(left)}" y="{_number(top + part * place)}" width="{_number(width)}" '
        f'height="{_number(part)}" fill="{colour}"/>'
        for place, colour in enumerate(box.colours)
    ]
    shapes.append(
        f'<rect x="{_number(left)}" y="{top}" width="{_number(width)}" height="{_BOX}" fill="none" stroke="#444444"/>'
    )
    if width >= _LETTER * len(box.name):
        middle = _number(left + width / 2)
        shapes.append(f'<text x="{middle}" y="{top + 15}" text-anchor="middle">{escape(box.name)}</text>')
    return f"<g><title>{escape(box.tip)}</title>{''.join(shapes)}</g>"


def _say(action: Action) -> str:
    return f"{action} ({_WORDS[action.kind]} of stage {action.stage}, microbatch {action.microbatch})"


def _legend_width(words: str) -> int:
    return 34 + _LETTER * len(words)


def _legend(entries: Sequence[tuple[str, str]], left: int, base: int) -> list[str]:
    lines = []
    for colour, words in entries:
        lines.append(f'<rect x="{left}" y="{base - 11}" width="14" height="14" fill="{colour}" stroke="#444444"/>')
        lines.append(f'<text x="{left + 20}" y="{base}">{escape(words)}</text>')
        left += _legend_width(words)
    return lines


def _number(value: float) -> str:
    """At most two digits after the point: a hundredth of a pixel is seen by nobody."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
