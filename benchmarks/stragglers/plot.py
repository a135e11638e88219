"""Curves of loss over seconds as an SVG of a few lines; it reads on light and dark pages."""

from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 320, 56, 40
_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#f58518", "#72b7b2")

Points = Sequence[tuple[float, float]]


def draw_svg(curves: Mapping[str, Points], target: float) -> str:
    """The curves, a line at the loss that is compared, and a legend."""
    last = max(points[-1][0] for points in curves.values())
    losses = [loss for points in curves.values() for _, loss in points]
    low, high = min(losses), max(losses)

    def across(seconds: float) -> float:
        return _LEFT + seconds / last * (_WIDTH - _LEFT - 16)

    def up(loss: float) -> float:
        return 12 + (high - loss) / (high - low) * (_HEIGHT - _BOTTOM - 12)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        '<g fill="#808080" stroke="none">',
    ]
    for part in range(5):
        seconds, loss = last * part / 4, low + (high - low) * part / 4
        lines.append(f'<text x="{across(seconds):.0f}" y="{_HEIGHT - 20}" text-anchor="middle">{seconds:.0f} s</text>')
        lines.append(f'<text x="{_LEFT - 8}" y="{up(loss) + 4:.0f}" text-anchor="end">{loss:.2f}</text>')
    lines.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">time since the first step</text>')
    lines.append("</g>")
    lines.append(
        f'<path d="M{_LEFT} {up(target):.1f}H{_WIDTH - 16}" stroke="#808080" stroke-dasharray="4 4" fill="none"/>'
    )
    for points, colour in zip(curves.values(), _COLOURS, strict=False):
        path = "L".join(f"{across(seconds):.1f} {up(loss):.1f}" for seconds, loss in points)
        lines.append(f'<path d="M{path}" stroke="{colour}" stroke-width="1.6" fill="none"/>')
    for place, (name, colour) in enumerate(zip(curves, _COLOURS, strict=False)):
        lines.append(f'<text x="{_WIDTH - 130}" y="{24 + 16 * place}" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
