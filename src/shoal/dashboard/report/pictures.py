"""Pictures of a report as SVG inside a page: curves, a heat map, a timeline. Colours come from the page's own style.

A curve of a million steps is drawn by its buckets: their means are the line, and the area around it reaches from the smallest to
the largest value of each, so that a spike of one step is seen. Nothing here needs a script, and all text is escaped.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 22, 26
LEVELS = 10
"""Shades of the heat map."""
MOST_BOXES = 800
"""Of a timeline; what is left out is the shortest, and the caller says how many."""


@dataclass(frozen=True, kw_only=True)
class DrawnCurve:
    """One curve by its buckets; None where a bucket has no finite value."""

    name: str
    x: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]
    mean: Sequence[float | None]
    bad: Sequence[int] = ()
    """How many values of each bucket are no numbers."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Something that happened, marked on the axis."""

    x: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Box:
    """Something that took time on a row of a timeline."""

    start: float
    end: float
    kind: str
    """Chooses the colour."""
    name: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a timeline."""

    label: str
    boxes: Sequence[Box]


def draw_curves(
    title: str, lines: Sequence[DrawnCurve], *, x_name: str, ticks: Sequence[Tick] = (), height: int = 200
) -> str:
    """Curves over one axis; empty where none has a point."""
    pairs = [
        (x, value)
        for line in lines
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
        for value in (low, high)
        if value is not None
    ]
    if not pairs:
        return ""
    frame = _Frame.around([x for line in lines for x in line.x], [value for _, value in pairs], height)
    parts = [_head(title, height), *frame.grid(x_name)]
    for place, line in enumerate(lines):
        parts += [f'<g class="c{place % 6}">', *_curve(line, frame), "</g>"]
    for tick in ticks:
        if frame.x0 <= tick.x <= frame.x1:
            at = _n(frame.px(tick.x))
            parts.append(
                f'<path class="tick" d="M{at} {_TOP}V{height - _BOTTOM}"><title>{_text(tick.text)}</title></path>'
            )
    if len(lines) > 1:
        parts += _names([line.name for line in lines])
    return "".join([*parts, "</svg>"])


def _curve(line: DrawnCurve, frame: "_Frame") -> Iterable[str]:
    for part in _ranges(line):
        upper = [f"{_n(frame.px(line.x[at]))} {_n(frame.py(_known(line.high[at])))}" for at in part]
        lower = [f"{_n(frame.px(line.x[at]))} {_n(frame.py(_known(line.low[at])))}" for at in reversed(part)]
        if any(line.high[at] != line.low[at] for at in part):
            yield f'<path class="band" d="M{"L".join([*upper, *lower])}Z"/>'
        middle = [f"{_n(frame.px(line.x[at]))} {_n(frame.py(_known(line.mean[at])))}" for at in part]
        if len(middle) == 1:
            left, top = middle[0].split(" ")
            yield f'<circle cx="{left}" cy="{top}" r="2"/>'
        yield f'<path class="line" d="M{"L".join(middle)}"/>'
    for x, bad in zip(line.x, line.bad, strict=False):
        if bad:
            at, base = _n(frame.px(x)), frame.height - _BOTTOM
            yield f'<path class="bad" d="M{at} {base}l-3 6h6z"><title>{bad} not finite</title></path>'


def _ranges(line: DrawnCurve) -> Iterable[list[int]]:
    """Buckets in a row that have values: a line must not cross what is missing."""
    found: list[int] = []
    for at in range(len(line.x)):
        if line.mean[at] is None or line.low[at] is None or line.high[at] is None:
            if found:
                yield found
            found = []
        else:
            found.append(at)
    if found:
        yield found


def _known(value: float | None) -> float:
    assert value is not None, "a part has values only"
    return value


@dataclass(frozen=True, kw_only=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float
    height: int

    @classmethod
    def around(cls, x: Sequence[float], y: Sequence[float], height: int) -> "_Frame":
        x0, x1, y0, y1 = min(x), max(x), min(y), max(y)
        room = (y1 - y0) * 0.05 or abs(y1) * 0.05 or 1.0
        return cls(x0=x0, x1=x1 if x1 > x0 else x0 + 1.0, y0=y0 - room, y1=y1 + room, height=height)

    def px(self, x: float) -> float:
        return _LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def py(self, y: float) -> float:
        return self.height - _BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (self.height - _TOP - _BOTTOM)

    def grid(self, x_name: str) -> Iterable[str]:
        for value in steps_between(self.y0, self.y1, 4):
            at = _n(self.py(value))
            yield f'<path class="grid" d="M{_LEFT} {at}H{WIDTH - _RIGHT}"/>'
            yield f'<text x="{_LEFT - 6}" y="{_n(self.py(value) + 4)}" text-anchor="end">{label(value)}</text>'
        for value in steps_between(self.x0, self.x1, 6):
            yield (f'<text x="{_n(self.px(value))}" y="{self.height - 10}" text-anchor="middle">{label(value)}</text>')
        yield f'<text x="{WIDTH - _RIGHT}" y="14" text-anchor="end">{_text(x_name)}</text>'


def steps_between(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two, about so many."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low] if math.isfinite(low) else []
    size = 10.0 ** math.floor(math.log10(span / about))
    size *= next((factor for factor in (1.0, 2.0, 5.0, 10.0) if span / (size * factor) <= about), 10.0)
    first = math.ceil(low / size)
    return [(first + place) * size for place in range(about + 2) if (first + place) * size <= high]


def label(value: float) -> str:
    """A number on an axis."""
    return f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-")


def draw_heat(
    title: str, rows: Sequence[str], columns: Sequence[tuple[int, int]], values: Sequence[Sequence[float | None]]
) -> str:
    """A heat map: shades from the smallest to the largest value; one path for each shade keeps it small."""
    known = [value for row in values for value in row if value is not None]
    if not known or not columns:
        return ""
    low, high = min(known), max(known)
    tall = 18 if len(rows) <= 24 else 10
    width, height = (WIDTH - _LEFT - _RIGHT) / len(columns), _TOP + tall * len(rows) + _BOTTOM
    shades: list[list[str]] = [[] for _ in range(LEVELS)]
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value is not None:
                level = min(LEVELS - 1, int((value - low) / (high - low) * LEVELS)) if high > low else 0
                at = f"M{_n(_LEFT + column * width)} {_TOP + row * tall}"
                shades[level].append(f"{at}h{_n(width)}v{tall}h-{_n(width)}z")
    parts = [_head(title, height)]
    parts += [f'<path class="h{level}" d="{"".join(shapes)}"/>' for level, shapes in enumerate(shades) if shapes]
    for row, name in enumerate(rows):
        if tall >= 12 or row % 4 == 0:
            parts.append(f'<text x="{_LEFT - 6}" y="{_TOP + row * tall + 12}" text-anchor="end">{_text(name)}</text>')
    for column in range(0, len(columns), max(1, len(columns) // 6)):
        x = _n(_LEFT + (column + 0.5) * width)
        parts.append(f'<text x="{x}" y="{height - 10}" text-anchor="middle">{columns[column][0]}</text>')
    scale = f"{seconds(low)} to {seconds(high)}"
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="14" text-anchor="end">{scale}, dark is long</text>')
    return "".join([*parts, "</svg>"])


def draw_timeline(title: str, rows: Sequence[Row]) -> str:
    """Rows of boxes in time, to scale, with a tip on each."""
    boxes = [box for row in rows for box in row.boxes if box.end > box.start]
    if not boxes:
        return ""
    kept = {id(box) for box in sorted(boxes, key=lambda box: box.start - box.end)[:MOST_BOXES]}
    first, last = min(box.start for box in boxes), max(box.end for box in boxes)
    left = min(220, max(_LEFT, 16 + 7 * max(len(row.label) for row in rows)))
    scale, height = (WIDTH - left - _RIGHT) / (last - first), _TOP + 22 * len(rows) + _BOTTOM
    parts = [_head(title, height)]
    for place, row in enumerate(rows):
        top = _TOP + 22 * place
        parts.append(f'<text x="{left - 6}" y="{top + 13}" text-anchor="end">{_text(row.label[:30])}</text>')
        for box in row.boxes:
            if id(box) not in kept:
                continue
            x, wide = left + (box.start - first) * scale, max(0.3, (box.end - box.start) * scale)
            tip = f"{box.name}: {seconds(box.end - box.start)} from {seconds(box.start - first)}"
            parts.append(
                f'<rect class="k-{_class(box.kind)}" x="{_n(x)}" y="{top}" width="{_n(wide)}" height="18">'
                f"<title>{_text(tip)}</title></rect>"
            )
            if wide >= 7 * len(box.name) + 2:
                parts.append(
                    f'<text class="in" x="{_n(x + wide / 2)}" y="{top + 13}" text-anchor="middle">{_text(box.name)}</text>'
                )
    for value in steps_between(0.0, last - first, 6):
        middle = _n(left + value * scale)
        parts.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle">{seconds(value)}</text>')
    return "".join([*parts, "</svg>"])


def seconds(value: float) -> str:
    """A time in few letters."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"


def _head(title: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_text(title)}">'
        f'<text class="title" x="8" y="14">{_text(title)}</text>'
    )


def _names(names: Sequence[str]) -> Iterable[str]:
    x = 200
    for place, name in enumerate(names):
        yield f'<g class="c{place % 6}"><path class="line" d="M{x} 10h14"/></g><text x="{x + 18}" y="14">{_text(name)}</text>'
        x += 30 + 7 * len(name)


def _class(kind: str) -> str:
    """A kind as the name of a class: what a file says may not leave the attribute."""
    return "".join(letter for letter in kind if letter.isascii() and letter.isalnum())[:20] or "other"


def _text(text: str) -> str:
    """Escaped; XML has no place for control characters."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))


def _n(value: float) -> str:
    """At most one digit after the point: a tenth of a pixel is seen by nobody."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
