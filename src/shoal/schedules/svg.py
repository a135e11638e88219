"""A schedule in time as a picture: a row per rank, a box per cell. One file with nothing outside it: no scripts, no fonts."""

from html import escape

from shoal.schedules.action import Action, Cell, Kind
from shoal.schedules.draw import short
from shoal.schedules.pricing import Span, Timeline
from shoal.schedules.schedule import Schedule

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


def draw_svg(schedule: Schedule, timeline: Timeline) -> str:
    """An SVG file; the tip on a box says stage, microbatch, start and end."""
    scale = _pixels_per_time(schedule, timeline)
    kinds = [
        kind for kind in Kind if any(kind is action.kind for row in schedule.rows for cell in row for action in cell)
    ]
    legend = _legend(kinds, _TOP + _ROW * len(schedule.rows) + _LEGEND - 12)
    # XML has no place for control characters, which the name of a file may hold.
    name = "".join(letter if letter.isprintable() else "?" for letter in schedule.name)
    title = f"{name}: {schedule.grid}, {timeline.bubble:.1%} idle"
    width = max(
        _LABEL + timeline.makespan * scale + 8, _LABEL + sum(map(_legend_width, kinds)), 8 + _LETTER * len(title)
    )
    height = _TOP + _ROW * len(schedule.rows) + _LEGEND
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_number(width)}" height="{height}" '
        f'viewBox="0 0 {_number(width)} {height}" font-family="monospace" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_number(width)}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="12">{escape(title)}</text>',
    ]
    for rank, (row, spans) in enumerate(zip(schedule.rows, timeline.spans, strict=True)):
        top = _TOP + _ROW * rank
        lines.append(f'<text x="8" y="{top + 15}">rank {rank}</text>')
        lines += [_box(cell, span, top, scale) for cell, span in zip(row, spans, strict=True)]
    return "\n".join([*lines, *legend, "</svg>"]) + "\n"


def _pixels_per_time(schedule: Schedule, timeline: Timeline) -> float:
    lengths = [end - start for row in timeline.spans for start, end in row if end > start]
    if not lengths:
        return 1.0
    name = _LETTER * max(len(short(cell)) for row in schedule.rows for cell in row) + 6
    named = name / max(min(lengths), max(lengths) / _TIMES_AS_WIDE)
    # Waits that dwarf the work must not make a picture of a mile.
    return min(named, _TIMES_AS_WIDE * name * len(lengths) / timeline.makespan)


def _box(cell: Cell, span: Span, top: int, scale: float) -> str:
    start, end = span
    left, width = _LABEL + start * scale, (end - start) * scale
    tip = f"{' and '.join(map(_say, cell))}: {start:g} to {end:g}"
    name = short(cell)
    shapes = [
        # Two that overlap share the height of the box.
        f'<rect x="{_number(left)}" y="{_number(top + _BOX / len(cell) * place)}" width="{_number(width)}" '
        f'height="{_number(_BOX / len(cell))}" fill="{_COLOURS[action.kind]}"/>'
        for place, action in enumerate(cell)
    ]
    shapes.append(
        f'<rect x="{_number(left)}" y="{top}" width="{_number(width)}" height="{_BOX}" fill="none" stroke="#444444"/>'
    )
    if width >= _LETTER * len(name):
        middle = _number(left + width / 2)
        shapes.append(f'<text x="{middle}" y="{top + 15}" text-anchor="middle">{escape(name)}</text>')
    return f"<g><title>{escape(tip)}</title>{''.join(shapes)}</g>"


def _say(action: Action) -> str:
    return f"{action} ({_WORDS[action.kind]} of stage {action.stage}, microbatch {action.microbatch})"


def _legend_width(kind: Kind) -> int:
    return 34 + _LETTER * len(f"{kind} {_WORDS[kind]}")


def _legend(kinds: list[Kind], base: int) -> list[str]:
    lines, left = [], _LABEL
    for kind in kinds:
        lines.append(
            f'<rect x="{left}" y="{base - 11}" width="14" height="14" fill="{_COLOURS[kind]}" stroke="#444444"/>'
        )
        lines.append(f'<text x="{left + 20}" y="{base}">{kind} {_WORDS[kind]}</text>')
        left += _legend_width(kind)
    return lines


def _number(value: float) -> str:
    """At most two digits after the point: a hundredth of a pixel is seen by nobody."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
