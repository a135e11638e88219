"""The losses as a picture: a row for each way to agree, between the loss of one replica alone and the dense one."""

from collections.abc import Mapping
from typing import Any

from contenders import ALONE, DENSE

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 800, 220, 640, 20, 56
_INK, _FAINT, _GROUND, _DOT = (
    ("#1f2328", "#e6edf3"),
    ("#d0d7de", "#3d444d"),
    ("#ffffff", "#0d1117"),
    ("#0969da", "#58a6ff"),
)


def draw_svg(steps: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """An SVG file: for every number of steps a panel with the rows in the order of their losses."""
    panels: list[str] = []
    height = 10
    for count, rows in steps.items():
        if DENSE in rows and ALONE in rows:
            lines, tall = _panel(count, rows, height)
            panels += lines
            height += tall
    style = (
        f"<style>@media (prefers-color-scheme: dark) {{ .ink {{ fill: {_INK[1]} }} .ground {{ fill: {_GROUND[1]} }} "
        f".grid {{ stroke: {_FAINT[1]} }} .dot {{ fill: {_DOT[1]}; stroke: {_DOT[1]} }} "
        f".edge {{ stroke: {_INK[1]} }} }}</style>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">\n'
        "<title>Validation loss of four replicas that agree in different ways</title>\n"
        f'{style}\n<rect class="ground" fill="{_GROUND[0]}" width="{_WIDTH}" height="{height}"/>\n'
        f'<g class="ink" fill="{_INK[0]}">\n' + "\n".join(panels) + "\n</g>\n</svg>\n"
    )


def _panel(count: str, rows: Mapping[str, Mapping[str, Any]], top: int) -> tuple[list[str], int]:
    order = sorted(rows, key=lambda name: rows[name]["loss"])
    values = [loss for row in rows.values() for loss in row["losses"].values()]
    low, high = min(values), max(values)

    def across(value: float) -> float:
        return _LEFT + 12 + (value - low) / (high - low) * (_RIGHT - _LEFT - 24)

    first = top + _TOP
    end = first + _ROW * len(order)
    lines = [
        f'<text x="12" y="{top + 18}" font-size="14">Validation loss after {count}, nats per byte</text>',
        f'<text x="{_RIGHT + 20}" y="{top + 38}" font-size="11">loss, and bytes sent beside dense</text>',
    ]
    for name in (DENSE, ALONE):
        x = across(rows[name]["loss"])
        lines.append(
            f'<line class="edge" stroke="{_INK[0]}" stroke-dasharray="4 4" x1="{x:.1f}" y1="{first - 12}" '
            f'x2="{x:.1f}" y2="{end - 8}"/><text x="{x:.1f}" y="{first - 17}" text-anchor="middle" font-size="11">'
            f"{name} {rows[name]['loss']:.3f}</text>"
        )
    for place, name in enumerate(order):
        row, y = rows[name], first + _ROW * place
        ends = across(min(row["losses"].values())), across(max(row["losses"].values()))
        lines.append(
            f'<line class="grid" stroke="{_FAINT[0]}" x1="{_LEFT}" y1="{y}" x2="{_RIGHT}" y2="{y}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{name}</text>'
            f'<line class="dot" stroke="{_DOT[0]}" stroke-width="2" x1="{ends[0]:.1f}" y1="{y}" x2="{ends[1]:.1f}" '
            f'y2="{y}"/><circle class="dot" fill="{_DOT[0]}" cx="{across(row["loss"]):.1f}" cy="{y}" r="4"/>'
            f'<text x="{_RIGHT + 20}" y="{y + 4}">{row["loss"]:.3f}'
            + (f", {row['share_of_bytes']:.1%}" if row["sent_per_step"] else "")
            + "</text>"
        )
    return lines, end - top + 16
