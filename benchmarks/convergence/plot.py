"""The curves as a picture: above, the losses; below, how far each asynchronous run is from its control. No fonts, no scripts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]

_WIDTH, _LEFT, _RIGHT = 780, 64, 600
_UPPER = (78, 350)
_LOWER = (392, 520)
_HEIGHT = 568
_APART = 15
"""Pixels between the lines of two labels."""

# A colour for a light ground and one for a dark. Looks are in the order of the runs (main.py), whose controls are dashed; marks
# and dashes tell the curves apart without any colour.
_INK, _FAINT, _GROUND = ("#1f2328", "#e6edf3"), ("#d0d7de", "#3d444d"), ("#ffffff", "#0d1117")
_COLOURS = (
    ("#1f2328", "#e6edf3"),
    ("#0969da", "#58a6ff"),
    ("#1f2328", "#e6edf3"),
    ("#bc4c00", "#f0883e"),
    ("#1a7f37", "#56d364"),
)
_DASHES = ("7 4", "", "2 4", "", "")
_MARKS = ("", "circle", "", "square", "diamond")


def draw_svg(runs: Mapping[str, Mapping[str, Any]], allowed: float, take: str) -> str:
    """An SVG file of at most five runs.

    Args:
        runs: each with ``curve`` (samples and loss), ``batch``, ``steps``, ``updates`` and ``control``, by name.
        allowed: what a run may differ from its control, as a share.
        take: what is the same in all of them, for the heading.
    """
    losses = {name: row["curve"] for name, row in runs.items()}
    differences = {
        name: percent_of_control(row["curve"], losses[row["control"]]) for name, row in runs.items() if row["control"]
    }
    last = max(x for points in losses.values() for x, _ in points)
    across = scale(0.0, last, _LEFT, _RIGHT)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        "<title>Validation loss of asynchronous pipelines and of their synchronous controls</title>",
        _dark(len(runs)),
        f'<rect class="ground" fill="{_GROUND[0]}" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<g class="ink" fill="{_INK[0]}">',
        f'<text x="{_LEFT}" y="22" font-size="14">{take}: the demo model, the same samples</text>',
        *_legend(runs),
        *_losses(losses, across),
        *_differences(differences, list(runs), across, allowed),
    ]
    for thousand in ticks(0.0, last, 6):
        x = across(thousand)
        lines.append(f'<text x="{x:.1f}" y="{_LOWER[1] + 18}" text-anchor="middle">{thousand:g}</text>')
    lines.append(
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">training samples seen</text>'
    )
    return "\n".join([*lines, "</g>", "</svg>"]) + "\n"


def percent_of_control(curve: Points, control: Points) -> list[tuple[float, float]]:
    """By how many percent a loss is above its control's, wherever both were evaluated."""
    beside = dict(control)
    return [(x, 100.0 * (loss / beside[x] - 1.0)) for x, loss in curve if x in beside]


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """Maps ``low`` to ``start`` and ``high`` to ``end``, pixels."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most ``most`` of them, as close together as that allows."""
    wide = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(wide))
    step = next(step for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if step >= wide * (1 - 1e-9))
    first, count = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 9) for place in range(first, count + 1)]


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Heights near the given ones, in their order, none nearer than ``apart`` to another."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[list[int]] = []
    middles: list[float] = []
    for place in order:
        groups.append([place])
        middles.append(heights[place])
        # Groups that touch become one around the mean of its members.
        while len(groups) > 1 and middles[-1] - middles[-2] < apart * (len(groups[-1]) + len(groups[-2])) / 2:
            joined = groups[-2] + groups[-1]
            groups[-2:], middles[-2:] = [joined], [sum(heights[one] for one in joined) / len(joined)]
    found = [0.0] * len(heights)
    for group, middle in zip(groups, middles, strict=True):
        for place, one in enumerate(group):
            found[one] = middle + apart * (place - (len(group) - 1) / 2)
    return found


def _dark(count: int) -> str:
    """What changes on a dark ground; the attributes of the elements hold for a light one and where styles are not read."""
    own = "".join(
        f".c{place} {{ stroke: {_COLOURS[place][1]}; fill: {_COLOURS[place][1]} }} " for place in range(count)
    )
    return (
        f"<style>@media (prefers-color-scheme: dark) {{ .ink {{ fill: {_INK[1]} }} .ground {{ fill: {_GROUND[1]} }} "
        f".grid {{ stroke: {_FAINT[1]} }} .band {{ fill: {_FAINT[1]} }} {own}}}</style>"
    )


def _legend(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row for each control and what is compared with it."""
    lines, x, y = [], _LEFT, 24
    for place, (name, row) in enumerate(runs.items()):
        x, y = (x + 228, y) if row["control"] else (_LEFT, y + 18)
        size = row["batch"] * row["steps"] // row["updates"]
        lines.append(_curve([(x, y), (x + 14, y), (x + 28, y)], place))
        lines.append(f'<text x="{x + 35}" y="{y + 4}">{name}: {row["updates"]} updates of {size}</text>')
    return lines


def _losses(losses: Mapping[str, Points], across: Scale) -> list[str]:
    values = [loss for points in losses.values() for _, loss in points]
    steps = ticks(min(values), max(values), 6)
    apart = steps[1] - steps[0]
    up = scale(min(min(values), steps[0] - apart / 2), max(max(values), steps[-1] + apart / 2), _UPPER[1], _UPPER[0])
    lines = [*_grid(steps, up, "{:.1f}"), _caption("validation loss, nats per byte", _UPPER)]
    return lines + _draw(losses, list(losses), across, up, lambda name, loss: f"{name} {loss:.3f}")


def _differences(differences: Mapping[str, Points], order: list[str], across: Scale, allowed: float) -> list[str]:
    values = [value for points in differences.values() for _, value in points]
    least = 150 * allowed  # so that the band has an edge on both sides
    low, high = min(-least, *values), max(least, *values)
    up = scale(low, high, _LOWER[1], _LOWER[0])
    top, bottom = up(100 * allowed), up(-100 * allowed)
    band = (
        f'<rect class="band" fill="{_FAINT[0]}" opacity="0.45" x="{_LEFT}" y="{top:.1f}" width="{_RIGHT - _LEFT}" '
        f'height="{bottom - top:.1f}"/>'
    )
    steps = ticks(low, high, 7)
    return [
        band,
        *_grid(steps, up, "{:+g}"),
        _caption("to its control, %", _LOWER),
        f'<text x="{_RIGHT - 6}" y="{top + 13:.1f}" text-anchor="end" font-size="11">within {allowed:.0%}</text>',
        *_draw(differences, order, across, up, lambda name, value: f"{name} {value:+.2f}%"),
    ]


def _draw(
    curves: Mapping[str, Points], order: list[str], across: Scale, up: Scale, label: Callable[[str, float], str]
) -> list[str]:
    """Curves with their names at the ends; ``order`` decides the colours."""
    ends = [up(points[-1][1]) for points in curves.values()]
    # Controls last, so that their dashes are seen on the curves that they lie under.
    lines: list[str] = []
    for (name, points), end, height in zip(curves.items(), ends, spread(ends, _APART), strict=True):
        place = order.index(name)
        pixels = [(across(x), up(y)) for x, y in points]
        lines.insert(len(lines) if _DASHES[place] else 0, _curve(pixels, place))
        lines.append(
            f'<line class="c{place}" stroke="{_COLOURS[place][0]}" stroke-width="0.8" '
            f'x1="{_RIGHT + 5}" y1="{end:.1f}" x2="{_RIGHT + 15}" y2="{height:.1f}"/>'
            f'<text x="{_RIGHT + 18}" y="{height + 4:.1f}" font-size="11">{label(name, points[-1][1])}</text>'
        )
    return lines


def _curve(pixels: Points, place: int) -> str:
    dash = f' stroke-dasharray="{_DASHES[place]}"' if _DASHES[place] else ""
    line = (
        f'<polyline fill="none" stroke-width="1.8"{dash} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)}"/>'
    )
    marks = "".join(_mark(x, y, _MARKS[place]) for x, y in pixels)
    return f'<g class="c{place}" fill="{_COLOURS[place][0]}" stroke="{_COLOURS[place][0]}">{line}{marks}</g>'


def _mark(x: float, y: float, shape: str) -> str:
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'
    if shape == "square":
        return f'<rect x="{x - 2.2:.1f}" y="{y - 2.2:.1f}" width="4.4" height="4.4"/>'
    if shape == "diamond":
        return f'<path d="M{x - 3.6:.1f},{y:.1f} l3.6,-3.6 3.6,3.6 -3.6,3.6 z"/>'
    return ""


def _grid(steps: Sequence[float], up: Scale, form: str) -> list[str]:
    return [
        f'<line class="grid" stroke="{_FAINT[0]}" x1="{_LEFT}" y1="{up(step):.1f}" x2="{_RIGHT}" y2="{up(step):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{up(step) + 4:.1f}" text-anchor="end">{form.format(step)}</text>'
        for step in steps
    ]


def _caption(text: str, span: tuple[int, int]) -> str:
    middle = (span[0] + span[1]) / 2
    return f'<text transform="rotate(-90 18 {middle})" x="18" y="{middle}" text-anchor="middle">{text}</text>'
