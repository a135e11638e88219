"""The report as one page to mail: pictures, the card, the story and the recipe in one file of HTML.

It needs no script and asks nobody for anything, and says so to the browser, which then refuses what an event might have brought
in. Light and dark follow the reader's system. A page is never larger than ``MOST_BYTES``: where a run has more, the longest parts
are cut and say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from shoal.dashboard.report.pictures import Box, DrawnCurve, Row, Tick, draw_curves, draw_heat, draw_timeline
from shoal.dashboard.report.words import card_lines
from shoal.dashboard.terminal.drawing import plain

MOST_BYTES = 500_000
_STYLE = Path(__file__).with_name("style.css")
_MOST_RANKS = 48
_TIMELINE_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class CurvePicture:
    """Curves that share a picture."""

    title: str
    lines: tuple[DrawnCurve, ...]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the page is made of."""

    card: Mapping[str, Any]
    curves: Sequence[CurvePicture]
    ticks: Sequence[Tick]
    ranks: Mapping[str, Any]
    timeline: Mapping[str, Any]
    story: Sequence[Mapping[str, Any]]
    recipe: str
    made_at: str


def build_page(parts: Parts) -> str:
    """The page."""
    for share in (1.0, 0.5, 0.2, 0.05, 0.0):
        page = "\n".join(_page(parts, share))
        if len(page.encode("utf-8")) <= MOST_BYTES:
            break
    return page


def _page(parts: Parts, share: float) -> Iterator[str]:
    card = parts.card
    title = plain(f"{card['name']}: {card['status']}")[:200]
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f'<meta name="referrer" content="no-referrer"><title>{escape(title)}</title>'
    yield f"<style>{_STYLE.read_text()}</style></head><body><main>"
    status = "".join(letter for letter in str(card["status"]) if letter.isalpha())
    yield f'<h1>{escape(plain(str(card["name"])))} <span class="status {status}">{escape(plain(str(card["status"])))}</span></h1>'
    yield '<table class="card">'
    for name, text in card_lines(card):
        yield f'<tr><th scope="row">{escape(name)}</th><td>{escape(text[:4000])}</td></tr>'
    yield "</table>"
    yield from _curves(parts, share)
    yield from _ranks(parts.ranks)
    yield from _timeline(parts.timeline)
    yield from _story(parts.story, int(200 * share))
    yield from _recipe(parts.recipe, int(60_000 * share))
    yield f"<footer>made by shoal report, {escape(parts.made_at)}</footer></main></body></html>"


def _curves(parts: Parts, share: float) -> Iterator[str]:
    pictures = [draw_curves(one.title, one.lines, x_name="step", ticks=parts.ticks) for one in parts.curves]
    shown = [picture for picture in pictures if picture]
    if not shown:
        return
    yield "<section><h2>Curves</h2>"
    yield "<p>The area around a line reaches from the least to the greatest value; triangles are values that are no numbers.</p>"
    yield from (f"<figure>{picture}</figure>" for picture in shown[: max(2, int(len(shown) * share))])
    yield "</section>"


def _ranks(view: Mapping[str, Any]) -> Iterator[str]:
    if not view["bins"]:
        return
    numbers, busy = list(view["ranks"]), list(view["busy"])
    title = "Busy time of a step, by rank and step"
    if not any(value is not None for row in busy for value in row):
        # Runs of earlier releases do not say for what they waited.
        busy, title = list(view["step"]), "Time of a step, by rank and step"
    order = list(range(len(numbers)))
    if len(order) > _MOST_RANKS:
        means = [_mean(busy[place]) for place in order]
        order = sorted(sorted(order, key=lambda place: -means[place])[:_MOST_RANKS])
        title += f" (the {_MOST_RANKS} slowest of {len(numbers)} ranks)"
    rows = [f"rank {numbers[place]}" for place in order]
    columns = [(int(first), int(last)) for first, last in view["bins"]]
    picture = draw_heat(title, rows, columns, [busy[place] for place in order])
    if picture:
        yield f"<section><h2>Ranks</h2><figure>{picture}</figure></section>"


def _mean(row: Sequence[float | None]) -> float:
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if known else 0.0


def _timeline(view: Mapping[str, Any]) -> Iterator[str]:
    if not view["executed"]:
        return
    rows = [row for rank in view["executed"][:_TIMELINE_RANKS] for row in timeline_rows(rank, "")]
    rows += [
        row for rank in (view.get("predicted") or ())[:_TIMELINE_RANKS] for row in timeline_rows(rank, " forecast")
    ]
    more = len(view["executed"]) - _TIMELINE_RANKS
    title = f"Step {view['step']}" + (f", {_TIMELINE_RANKS} of {len(view['executed'])} ranks" if more > 0 else "")
    picture = draw_timeline(title, rows)
    if not picture:
        return
    yield "<section><h2>Timeline of a step</h2>"
    yield f"<figure>{picture}</figure>"
    planned = view.get("planned")
    if planned:
        lines = (" ".join(str(cell or ".")[:8].ljust(5) for cell in row)[:600] for row in planned[:_TIMELINE_RANKS])
        yield "<h3>As planned, cell by cell</h3><pre>" + escape(plain_lines("\n".join(lines))) + "</pre>"
    yield "</section>"


def timeline_rows(entry: Mapping[str, Any], suffix: str) -> Iterator[Row]:
    """The rows of a rank: what it does, and below it what crosses to other ranks."""
    boxes: dict[str, list[Box]] = {}
    for kind, name, start, seconds, *_ in entry["spans"]:
        row = {"comm": " comm", "data": "", "phase": ""}.get(str(kind), " cells" if kind == "cell" else " other")
        colour = cell_kind(str(name)) if kind == "cell" else str(name) if kind == "phase" else str(kind)
        boxes.setdefault(row, []).append(
            Box(start=float(start), end=float(start) + float(seconds), kind=colour, name=str(name)[:60])
        )
    for row in ("", " cells", " comm", " other"):
        if row in boxes:
            yield Row(label=f"rank {entry['rank']}{suffix}{row}", boxes=boxes[row])


def cell_kind(name: str) -> str:
    """The colour of a schedule's cell: its letter, of ``2F0`` that of forward."""
    letter = next((letter for letter in name if letter in "FBIW"), "")
    return {"F": "forward", "B": "backward", "I": "inputgrad", "W": "weightgrad"}.get(letter, "other")


def _story(items: Sequence[Mapping[str, Any]], most: int) -> Iterator[str]:
    if not items or not most:
        return
    # What is bad is kept first, and shown where it belongs.
    by_need = sorted(
        range(len(items)), key=lambda at: ({"error": 0, "warning": 1}.get(items[at].get("level", ""), 2), -at)
    )
    kept = sorted(by_need[:most])
    yield "<section><h2>Story</h2><ol>"
    for at in kept:
        item = items[at]
        level = item.get("level") if item.get("level") in ("warning", "error") else "info"
        step = "" if item.get("step") is None else f"step {item['step']}"
        moment = escape(plain(str(item.get("time", ""))))
        text = escape(plain_lines(str(item.get("text", ""))[:1000]))
        trace = str(item.get("traceback") or "")[-4000:]
        more = f"<pre>{escape(plain_lines(trace))}</pre>" if trace else ""
        yield f'<li class="{level}"><time>{moment}</time> <b>{escape(step)}</b> {text}{more}</li>'
    yield "</ol>"
    if len(kept) < len(items):
        yield f"<p>{len(items) - len(kept)} of {len(items)} lines are left out.</p>"
    yield "</section>"


def _recipe(text: str, most: int) -> Iterator[str]:
    if text and most:
        cut = f"\n... {len(text) - most} more characters" if len(text) > most else ""
        yield f"<section><h2>Recipe</h2><pre>{escape(plain_lines(text[:most] + cut))}</pre></section>"


def plain_lines(text: str) -> str:
    """Text of a file with its line ends, and without what is no letter."""
    return "\n".join(plain(line.replace("\t", "    ")) for line in text.split("\n"))
