"""A step as every rank did it, beside the schedule as it was planned and as it would go with the usual times of its cells."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.pipelines import parse_replicas
from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.forecast import forecast_of
from shoal.dashboard.views.overview import rank_places, timeline_steps
from shoal.dashboard.views.plain import finite, text
from shoal.schedules.catalogue import FAMILIES, make_schedule
from shoal.schedules.player import Timeline, order_cells, play, timeline_of
from shoal.schedules.pricing import price
from shoal.schedules.schedule import Schedule, parse_cell, write_cell

_MOST_ROWS = 3000
"""Of an answer: 200 KB of them."""
_OTHER_STEPS = 8
_MOST_CELLS = 20_000
_LATER_KINDS = ("send", "receive")


@dataclass(frozen=True)
class Span:
    """Something that a rank did."""

    kind: str
    name: str
    start: float
    seconds: float
    num_bytes: int

    @property
    def end(self) -> float:
        """When it was done."""
        return self.start + self.seconds

    def moved(self, by: float) -> "Span":
        """The same at another time."""
        return Span(self.kind, self.name, self.start + by, self.seconds, self.num_bytes)

    def as_row(self) -> list[Any]:
        """For an answer."""
        return [self.kind, self.name, round(self.start, 7), round(self.seconds, 7), self.num_bytes]


@dataclass(frozen=True)
class RankSpans:
    """What a rank did in a step, by its own clock."""

    rank: int
    begin: float
    spans: tuple[Span, ...]
    left_out: int
    num_steps: int


def timeline_answer(run: Run, step: int | None = None, rank: int | None = None) -> dict[str, Any]:
    """A step: ``/api/run/ID/timeline``.

    Args:
        run: whose.
        step: which; None for the newest that ranks wrote spans of.
        rank: alone; None for all.
    """
    steps = timeline_steps(run)
    chosen = step if step is not None else (steps[-1] if steps else None)
    found = [] if chosen is None else read_step(run, chosen)
    aligned, residual = align(found, _hosts(run))
    schedule = planned_schedule(run, found[0].num_steps if found else 1)
    priced = None if schedule is None else _predict(run, schedule, chosen, steps, aligned)
    rows, left_out = _fit(aligned if rank is None else {rank: aligned.get(rank, ())})
    return {
        "step": chosen,
        "num_steps": found[0].num_steps if found else 1,
        "steps": steps,
        "executed": [{"rank": one, "spans": [span.as_row() for span in spans]} for one, spans in rows.items()],
        "left_out": left_out + sum(one.left_out for one in found),
        "planned": None if schedule is None else planned_grid(schedule),
        "predicted": None if priced is None else priced[0],
        "predicted_by": None if priced is None else priced[2],
        "bubble": {
            "measured": finite(measured_bubble(aligned)),
            "planned": None if schedule is None else finite(price(schedule).bubble),
            "predicted": None if priced is None else finite(priced[1].bubble),
        },
        "residual_s": residual,
    }


def read_step(run: Run, step: int) -> list[RankSpans]:
    """What ranks wrote of a step: of one that was done again, the last time."""
    found = []
    for file in run.ranks:
        events = file.read_spans(step)
        if events and file.rank is not None:
            event = events[-1]
            rows = event.get("spans")
            spans = tuple(_spans(rows if isinstance(rows, list) else []))
            count = event.get("num_steps")
            left_out = event.get("left_out")
            found.append(
                RankSpans(
                    file.rank,
                    as_number(event.get("begin")),
                    spans,
                    left_out if isinstance(left_out, int) else 0,
                    count if isinstance(count, int) and 0 < count < 1000 else 1,
                )
            )
    return found


def _spans(rows: Iterable[Any]) -> Iterable[Span]:
    for row in rows:
        if not isinstance(row, list) or len(row) != 5:
            continue
        start, seconds, num_bytes = (as_number(value) for value in row[2:])
        if math.isfinite(start + seconds) and seconds >= 0:
            size = int(num_bytes) if math.isfinite(num_bytes) else 0
            yield Span(text(row[0], 20), text(row[1], 100), start, seconds, size)


def _hosts(run: Run) -> dict[int, str]:
    return {place["rank"]: place["host"] for place in rank_places(run)}


def align(found: Sequence[RankSpans], hosts: dict[int, str]) -> tuple[dict[int, tuple[Span, ...]], float | None]:
    """Spans on one time axis that begins at 0, and how well the ends of what all ranks leave together still differ.

    Ranks leave a collective at the same moment, whatever their clocks say. Those of one host have one clock, so all of them are
    shifted alike.
    """
    if not found:
        return {}, None
    start = min(one.begin for one in found)
    placed = {one.rank: tuple(span.moved(one.begin - start) for span in one.spans) for one in found}
    ends = {rank: _collective_ends(spans) for rank, spans in placed.items()}
    shared = set.intersection(*(set(one) for one in ends.values())) if len(ends) > 1 else set()
    residual = None
    if shared:
        middles = {key: statistics.median(one[key] for one in ends.values()) for key in shared}
        late = {rank: statistics.median(one[key] - middles[key] for key in shared) for rank, one in ends.items()}
        by_host: dict[str, list[float]] = {}
        for rank, shift in late.items():
            by_host.setdefault(hosts.get(rank, ""), []).append(shift)
        shifts = {host: statistics.median(values) for host, values in by_host.items()} if len(by_host) > 1 else {}
        moves = {rank: -shifts.get(hosts.get(rank, ""), 0.0) for rank in placed}
        placed = {rank: tuple(span.moved(moves[rank]) for span in spans) for rank, spans in placed.items()}
        residual = max(abs(late[rank] + moves[rank]) for rank in placed)
    first = min((span.start for spans in placed.values() for span in spans), default=0.0)
    return {rank: tuple(span.moved(-first) for span in spans) for rank, spans in placed.items()}, finite(residual)


def _collective_ends(spans: Sequence[Span]) -> dict[tuple[str, int], float]:
    """The ends of collectives, by name and how many of that name come after it."""
    found: dict[tuple[str, int], float] = {}
    seen: dict[str, int] = {}
    for span in sorted(spans, key=lambda one: -one.end):
        if span.kind == "comm" and not span.name.endswith(_LATER_KINDS):
            number = seen[span.name] = seen.get(span.name, -1) + 1
            found[(span.name, number)] = span.end
    return found


def measured_bubble(aligned: dict[int, tuple[Span, ...]]) -> float | None:
    """The share of all ranks' time, from the first cell to the end of the last, in which they worked on none."""
    cells = {rank: [span for span in spans if span.kind == "cell"] for rank, spans in aligned.items()}
    if not any(cells.values()):
        return None
    every = [span for spans in cells.values() for span in spans]
    whole = (max(span.end for span in every) - min(span.start for span in every)) * len(cells)
    return 1.0 - sum(span.seconds for span in every) / whole if whole > 0 else None


def planned_schedule(run: Run, steps: int = 1) -> Schedule | None:
    """The schedule that plan.json names; None for a plan without one, or with one in a file, which is not read."""
    plan = run.plan
    name, ranks, microbatches = plan.get("schedule"), plan.get("pp"), plan.get("microbatches")
    if name not in FAMILIES or not isinstance(ranks, int) or not isinstance(microbatches, int) or ranks < 2:
        return None
    chunks, replicas = plan.get("chunks"), plan.get("replicas")
    if not 0 < microbatches * ranks * (chunks if isinstance(chunks, int) else 2) * steps * 3 < _MOST_CELLS:
        return None
    try:
        return make_schedule(
            name,
            ranks=ranks,
            microbatches=microbatches,
            chunks=chunks if isinstance(chunks, int) else None,
            replicas=parse_replicas(replicas) if isinstance(replicas, str) else None,
            steps=steps,
        )
    except (RequestError, ValueError):
        return None


def planned_grid(schedule: Schedule) -> list[list[str]]:
    """The cells of every pipeline rank in columns, where each takes one."""
    order = order_cells(schedule)
    starts, ends = play(order, [1] * len(order.cells), [0] * len(order.rows), begin=0, later=max)
    grid = [[""] * max(ends, default=0) for _ in order.rows]
    for number, cell in enumerate(order.cells):
        grid[cell.rank][starts[number]] = write_cell(cell.cell)
    return grid


def _predict(
    run: Run, schedule: Schedule, step: int | None, steps: Sequence[int], aligned: dict[int, tuple[Span, ...]]
) -> tuple[list[dict[str, Any]], Timeline, str] | None:
    """The schedule played with the usual times of its cells, or, where none were measured, with those of the forecast."""
    others = sorted((one for one in steps if one != step), key=lambda one: abs(one - (step or 0)))[:_OTHER_STEPS]
    # The first step that is measured also starts everything up.
    others = [one for one in others if one != steps[0]] or others
    measured = [span for one in others for found in read_step(run, one) for span in found.spans]
    by = f"medians of the cells of {len(others)} other steps"
    if not any(span.kind == "cell" for span in measured):
        measured, by = [span for spans in aligned.values() for span in spans], "medians of the cells of this step"
    usual = _usual_seconds(span for span in measured if span.kind == "cell")
    order = order_cells(schedule)
    if usual:
        durations = [usual.get(_likeness(write_cell(one.cell)), usual[""]) for one in order.cells]
        transfer = [span.seconds for span in measured if span.name.endswith("send")]
        transfers = [statistics.median(transfer) if transfer else 0.0] * len(order.rows)
        starts, ends = play(order, durations, transfers, begin=0.0, later=max)
        played = timeline_of(order, starts, ends)
    else:
        seconds = as_number((forecast_of(run) or {}).get("step_seconds"))
        played = price(schedule)
        if not math.isfinite(seconds) or played.makespan <= 0:
            return None
        scale, by = seconds / played.makespan, "the forecast's seconds of a step"
        played = Timeline(spans=tuple(tuple((a * scale, b * scale) for a, b in row) for row in played.spans))
    first = _first_ranks(run, len(schedule.rows))
    rows = [
        {
            "rank": first[place],
            "spans": [
                Span("cell", write_cell(cell), start, end - start, 0).as_row()
                for cell, (start, end) in zip(schedule.rows[place], played.spans[place], strict=True)
            ],
        }
        for place in range(len(schedule.rows))
    ]
    return rows, played, by


def _likeness(name: str) -> str:
    """What cells have in common that take alike long: stages and kinds, whatever the microbatch."""
    try:
        return "+".join(f"{action.stage}{action.kind}" for action in parse_cell(name))
    except RequestError:
        return ""


def _usual_seconds(cells: Iterable[Span]) -> dict[str, float]:
    """Medians by likeness; of all together under the empty name."""
    found: dict[str, list[float]] = {}
    for span in cells:
        found.setdefault(_likeness(span.name), []).append(span.seconds)
    if not found:
        return {}
    every = [value for values in found.values() for value in values]
    return {**{name: statistics.median(values) for name, values in found.items()}, "": statistics.median(every)}


def _first_ranks(run: Run, count: int) -> list[int]:
    """The first rank of each place along the pipeline."""
    found: dict[int, int] = {}
    for place in rank_places(run):
        at = place["coordinates"].get("pp")
        if isinstance(at, int):
            found.setdefault(at, place["rank"])
    return [found.get(place, place) for place in range(count)]


def _fit(aligned: dict[int, tuple[Span, ...]]) -> tuple[dict[int, list[Span]], int]:
    """Spans that an answer has room for: all, or cells and the longest of the others."""
    total = sum(map(len, aligned.values()))
    if total <= _MOST_ROWS:
        return {rank: list(spans) for rank, spans in aligned.items()}, 0
    ordered = sorted(
        ((rank, span) for rank, spans in aligned.items() for span in spans),
        key=lambda pair: (pair[1].kind != "cell", -pair[1].seconds),
    )[:_MOST_ROWS]
    kept: dict[int, list[Span]] = {rank: [] for rank in aligned}
    for rank, span in ordered:
        kept[rank].append(span)
    return {rank: sorted(spans, key=lambda span: span.start) for rank, spans in kept.items()}, total - len(ordered)
