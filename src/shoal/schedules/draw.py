"""A schedule as text, by order for messages and by time for the terminal, and as a picture.

A picture has a row per rank and a box per cell. It is one SVG file with nothing outside it: no scripts, no fonts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.schedules.player import Span, Timeline
from shoal.schedules.schedule import Action, Cell, Kind, Row, Schedule

_AROUND = 6
"""Cells shown on each side of an arrow."""
_TIMES_AS_WIDE = 8
"""A drawing is at most so many times as wide as its cells' names need; what is shorter by more is cut short."""
# Light backgrounds, under black letters. Two that overlap have the colour of the backward.
_COLOURS = {Kind.FORWARD: 104, Kind.BACKWARD: 102, Kind.INPUT: 106, Kind.WEIGHT: 105}


def short(cell: Cell) -> str:
    """A cell in few letters: two that overlap are joined."""
    return "&".join(map(str, cell))


def draw_order(schedule: Schedule, *, arrow: tuple[int, int] | None = None) -> str:
    """Rows of cells in the order of work, ``.`` where a row has ended; the cell that is meant has an arrow under it."""
    longest = max(map(len, schedule.rows), default=0)
    first, last = 0, longest
    if arrow is not None:
        first, last = max(0, arrow[1] - _AROUND), arrow[1] + _AROUND + 1
    shown = [[short(cell) for cell in row[first:last]] for row in schedule.rows]
    width = max((len(text) for row in shown for text in row), default=1)
    labels, lines = _labels(schedule), []
    for rank, row in enumerate(shown):
        padded = row + ["."] * (min(last, longest + 1) - first - len(row))
        before, after = ("... " if first else ""), (" ..." if last < longest else "")
        lines.append(f"{labels[rank]}{before}{' '.join(text.ljust(width) for text in padded)}{after}")
        if arrow is not None and arrow[0] == rank:
            column = len(labels[rank] + before) + (arrow[1] - first) * (width + 1)
            lines.append(" " * column + "^ here")
    return "\n".join(line.rstrip() for line in lines)


def draw_time(schedule: Schedule, timeline: Timeline, *, colour: bool, width: int | None = None) -> str:
    """Rows of cells in time, to the right; idle time is blank. A cell is as wide as the time that it takes.

    Args:
        schedule: what is drawn.
        timeline: its times.
        colour: give each kind of action a background.
        width: letters of the longest line that may be written; longer drawings go on below. None for one long line.
    """
    letters_per_time = _scale(schedule, timeline)
    total = round(timeline.makespan * letters_per_time)
    labels = _labels(schedule)
    lanes = [_text_lane(row, spans, letters_per_time) for row, spans in zip(schedule.rows, timeline.spans, strict=True)]
    # A band narrower than a name would say nothing.
    band = max(total, 1) if width is None else max(width - len(labels[0]), _letters(schedule))
    bands = []
    for first in range(0, max(total, 1), band):
        last = min(first + band, total)
        lines = [label + _paint(lane, first, last, colour=colour) for label, lane in zip(labels, lanes, strict=True)]
        if total > band:
            lines.insert(0, f"time {first / letters_per_time:.4g} to {last / letters_per_time:.4g}")
        bands.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(bands)


_TextLane = list[tuple[int, int, Cell]]
"""First column, the column after the last, and what is there, in order and without overlaps."""


def _labels(schedule: Schedule) -> list[str]:
    digits = max(2, len(str(len(schedule.rows) - 1)))
    return [f"rank {rank:>{digits}}  " for rank in range(len(schedule.rows))]


def _letters(schedule: Schedule) -> int:
    """Columns in which every cell can say its name, and a blank after it."""
    return max((len(short(cell)) for row in schedule.rows for cell in row), default=1) + 1


def _scale(schedule: Schedule, timeline: Timeline) -> float:
    """Columns per unit of time: as few as let the shortest cell say its name, unless others would grow out of all measure."""
    lengths = [end - start for row in timeline.spans for start, end in row if end > start]
    if not lengths:
        return 1.0
    letters = _letters(schedule)
    named = letters / max(min(lengths), max(lengths) / _TIMES_AS_WIDE)
    return min(named, _TIMES_AS_WIDE * letters * len(lengths) / timeline.makespan)


def _text_lane(row: Row, spans: tuple[Span, ...], scale: float) -> _TextLane:
    return [(round(start * scale), round(end * scale), cell) for cell, (start, end) in zip(row, spans, strict=True)]


def _paint(lane: _TextLane, first: int, last: int, *, colour: bool) -> str:
    """The columns of a lane from ``first`` to before ``last``; a cell that the edge cuts goes on in the next band."""
    text, at = "", first
    for left, right, cell in lane:
        start, end = max(left, first), min(right, last)
        # What takes no time has no place in time.
        if start < end:
            shown = short(cell)[: right - left].ljust(right - left)[start - left : end - left]
            text += " " * (start - at) + (f"\033[{_COLOURS[cell[-1].kind]};30m{shown}\033[0m" if colour else shown)
            at = end
    return text


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward, input gradient",
    Kind.WEIGHT: "backward, weight gradient",
}
# Of unlike lightness, so that they differ in grey too; the letter in each box says the same without any colour.
_FILLS = {Kind.FORWARD: "#9ecae1", Kind.BACKWARD: "#f4a582", Kind.INPUT: "#fddbc7", Kind.WEIGHT: "#e6f5c9"}

_LETTER = 7
"""Width of a letter of 11 pixels, and a little air."""
_LABEL = 64
_ROW = 26
_BOX = 22
_TOP = 28
_LEGEND = 34


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
    return Box(start, end, short(cell), tip, tuple(_FILLS[action.kind] for action in cell))


def cell_legend(kind: Kind) -> tuple[str, str]:
    """The colour of a kind of action, and its words."""
    return _FILLS[kind], f"{kind} {_WORDS[kind]}"


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
