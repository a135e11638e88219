"""A schedule as text: by order, for messages, and by time, for the terminal."""

from shoal.schedules.player import Span, Timeline
from shoal.schedules.schedule import Cell, Kind, Row, Schedule

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
    lanes = [_lane(row, spans, letters_per_time) for row, spans in zip(schedule.rows, timeline.spans, strict=True)]
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


Lane = list[tuple[int, int, Cell]]
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


def _lane(row: Row, spans: tuple[Span, ...], scale: float) -> Lane:
    return [(round(start * scale), round(end * scale), cell) for cell, (start, end) in zip(row, spans, strict=True)]


def _paint(lane: Lane, first: int, last: int, *, colour: bool) -> str:
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
