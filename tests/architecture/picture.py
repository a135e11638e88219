"""Draws docs/rooms.svg: the rooms by rows, and an arrow from each room to those that it stands on.

Run it after the imports between rooms have changed: ``python tests/architecture/picture.py``. Only arrows that no other way of
arrows implies are drawn, so what is left out is what can be read from the rest. A test compares the file with the source.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from architecture.conftest import read_modules  # noqa: E402
from architecture.rooms import ROWS, room_imports  # noqa: E402

WIDTH, ROW_HEIGHT, BOX_HEIGHT, MARGIN = 960, 78, 40, 28
COLOURS = ("#e8eef7", "#dfeaf5", "#dcefe9", "#e6f1dc", "#f4f0d8", "#f9e3cf", "#f7dcd6", "#f1dce6", "#e6def0", "#e2e2ea")


def drawn_imports(imports: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports that no longer way of imports implies."""

    def reached(room: str) -> set[str]:
        found: set[str] = set()
        waiting = [room]
        while waiting:
            for below in imports.get(waiting.pop(), ()):
                if below not in found:
                    found.add(below)
                    waiting.append(below)
        return found

    return {
        (room, below)
        for room, belows in imports.items()
        for below in belows
        if not any(below in reached(other) for other in belows if other != below)
    }


def draw(imports: dict[str, set[str]]) -> str:
    """The picture, as the text of an SVG file."""
    rows = [[room for room in row if room in imports and room != "__main__"] for row in ROWS]
    rows = [row for row in rows if row]
    height = MARGIN * 2 + ROW_HEIGHT * len(rows)
    places: dict[str, tuple[float, float, float]] = {}
    boxes = []
    for number, row in enumerate(rows):
        box = min(150.0, (WIDTH - 2 * MARGIN - 16 * (len(row) - 1)) / len(row))
        left = (WIDTH - box * len(row) - 16 * (len(row) - 1)) / 2
        top = height - MARGIN - ROW_HEIGHT * (number + 1) + (ROW_HEIGHT - BOX_HEIGHT) / 2
        for place, room in enumerate(row):
            x = left + place * (box + 16)
            places[room] = (x + box / 2, top, top + BOX_HEIGHT)
            size = f'width="{box:.0f}" height="{BOX_HEIGHT}" rx="6"'
            colour = COLOURS[number % len(COLOURS)]
            boxes.append(f'<rect x="{x:.0f}" y="{top:.0f}" {size} fill="{colour}" stroke="#55606e"/>')
            middle, line = x + box / 2, top + BOX_HEIGHT / 2 + 5
            boxes.append(f'<text x="{middle:.0f}" y="{line:.0f}" text-anchor="middle">{room}</text>')
    arrows = []
    for room, below in sorted(drawn_imports(imports)):
        if room in places and below in places:
            (x, _, bottom), (to_x, to_top, _) = places[room], places[below]
            bend = (to_top - bottom) / 2
            points = f"{x:.0f},{bottom + bend:.0f} {to_x:.0f},{to_top - bend:.0f} {to_x:.0f},{to_top - 3:.0f}"
            arrows.append(f'<path d="M{x:.0f},{bottom:.0f} C{points}"/>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">',
            "<title>The rooms of Shoal: each stands on those that its arrows lead to</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="#55606e"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            '<g fill="none" stroke="#8b95a3" stroke-width="1.2" marker-end="url(#tip)">',
            *arrows,
            "</g>",
            *boxes,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Write the picture of the source as it is."""
    (ROOT / "docs" / "rooms.svg").write_text(draw(room_imports(read_modules(ROOT / "src"))))


if __name__ == "__main__":
    main()
