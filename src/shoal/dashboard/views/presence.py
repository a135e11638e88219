"""Who was there when, as rows on a time axis: centers by election, epochs, members, and what befell them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.plain import text

_MOST_SPANS = 1500
"""Of an answer: 100 KB of them."""
_MOST_MEMBERS = 100
_SHOWN = 0.004
"""Of the whole: as long as a moment is drawn, so that it can be seen and pointed at."""
_THERE, _AWAY, _SAID = "data", "wait", "phase"
"""Kinds of spans, as timelines draw them."""

Row = dict[str, Any]


def began(run: Run) -> float:
    """The moment of the first event; 0 where there is none."""
    firsts = [kept.first[0][1] for file in run.files.values() for kept in file.kept.values() if kept.first]
    return min((float(event["t"]) for event in firsts), default=0.0)


def presence(run: Run) -> dict[str, Any] | None:
    """Rows of spans of kind, name, begin, seconds and 0, by seconds since the first event; None where nobody came or went."""
    views: dict[object, Mapping[str, Any]] = {}
    for event in run.events("view"):
        views.setdefault(event.get("epoch"), event)
    told = run.events("rank_failed", "hung", "went_back", "resumed", "straggler")
    if not views and not told:
        return None
    start = began(run)
    end = max(run.newest, start) - start
    changes = sorted(views.values(), key=lambda event: float(event["t"]))[-_MOST_SPANS // 4 :]
    names = {event["rank"]: text(event.get("name", ""), 60) for event in run.events("placed")}
    rows = [_centers(changes, names, start, end), _epochs(changes, start, end), *_members(changes, start, end)]
    rows += [_starts(run, start, end), _moments(told, start, end)]
    kept, left = [], _MOST_SPANS
    for row in rows:
        if row["spans"] and left > 0:
            kept.append({**row, "spans": row["spans"][-left:]})
            left -= len(row["spans"])
    begin = min((span[2] for row in kept for span in row["spans"]), default=0.0)
    return {"begin": begin, "end": round(end, 3), "rows": kept}


def _row(label: str, spans: Sequence[tuple[str, str, float, float]]) -> Row:
    """Spans without those that end before they begin, because a clock was set back."""
    found = [
        [kind, name, round(a, 4), round(max(b - a, 0.0), 4), 0] for kind, name, a, b in spans if np.isfinite(a + b)
    ]
    return {"label": label, "spans": found}


def _at(event: Mapping[str, Any], start: float) -> float:
    return float(event["t"]) - start


def _centers(changes: Sequence[Mapping[str, Any]], names: Mapping[Any, str], start: float, end: float) -> Row:
    """Who published the views: where that changes, another center was elected."""
    by = [(names.get(event.get("rank"), ""), _at(event, start)) for event in changes]
    led = [(name, min(at for _, at in group)) for name, group in itertools.groupby(by, key=lambda one: one[0])]
    ends = [*(at for _, at in led[1:]), end][: len(led)]
    spans = [
        (_THERE, name, at, until) for (name, at), until in zip(led, ends, strict=True) if name.startswith("center")
    ]
    return _row("center", spans)


def _epochs(changes: Sequence[Mapping[str, Any]], start: float, end: float) -> Row:
    ends = [*(_at(event, start) for event in changes[1:]), end][: len(changes)]
    return _row(
        "epoch",
        [
            (_SAID, text(f"{event.get('epoch')}: {event.get('cause', '')}", 200), _at(event, start), until)
            for event, until in zip(changes, ends, strict=True)
        ],
    )


def _members(changes: Sequence[Mapping[str, Any]], start: float, end: float) -> list[Row]:
    """Of every member when it was there, and when it was away between two times, with what was said of it."""
    spans: dict[str, list[tuple[str, str, float, float]]] = {}
    there: dict[str, float] = {}
    away: dict[str, tuple[float, str]] = {}
    for event in changes:
        at, members = _at(event, start), event.get("members")
        now = {text(one, 60) for one in members} if isinstance(members, list) else set()
        for name in sorted(now - set(there)):
            if name in away:
                since, cause = away.pop(name)
                spans[name].append((_AWAY, cause, since, at))
            if name in spans or len(spans) < _MOST_MEMBERS:
                spans.setdefault(name, [])
                there[name] = at
        for name in sorted(set(there) - now):
            spans[name].append((_THERE, name, there.pop(name), at))
            away[name] = (at, text(event.get("cause", ""), 200))
    for name, at in there.items():
        spans[name].append((_THERE, name, at, end))
    for name, (since, cause) in away.items():
        spans[name].append((_AWAY, cause, since, end))
    return [_row(name, sorted(found, key=lambda one: one[2])) for name, found in sorted(spans.items())]


def _starts(run: Run, start: float, end: float) -> Row:
    """The generations of a run that all ranks begin again together, and what ended each."""
    lead = run.lead()
    begins = (
        {} if lead is None else {event.get("generation"): _at(event, start) for event in lead.events("run_started")}
    )
    spans = []
    for event in run.events("rank_failed"):
        died, generation = _at(event, start), event.get("generation")
        after = [at for at in begins.values() if at > died]
        cause = text(f"rank {event.get('culprit_rank')}: {event.get('cause', '')}", 200)
        spans.append((_AWAY, cause, died, min(after, default=end) if event.get("restarting") is True else end))
        if generation in begins:
            spans.append((_THERE, f"generation {generation}", begins[generation], died))
    return _row("ranks", sorted(spans, key=lambda one: one[2]))


def _moments(told: Sequence[Mapping[str, Any]], start: float, end: float) -> Row:
    """What happened at a moment: a hang, a return to a checkpoint, a recovery, a straggler."""
    least = _SHOWN * end
    spans = []
    for event in told:
        if event["kind"] == "rank_failed":
            continue
        who = next((text(event[name], 100) for name in ("worker", "member", "source") if event.get(name)), "")
        at = _at(event, start)
        spans.append((_SAID, f"{event['kind'].replace('_', ' ')} {who}".strip(), at, at + least))
    return _row("events", spans)
