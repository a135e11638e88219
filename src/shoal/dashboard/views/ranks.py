"""Ranks beside each other: where their time went, who is slow, memory and traffic beside the forecast, and the mesh.

In a synchronous run every rank's step lasts as long as the slowest one's. What tells ranks apart is busy time: a step's seconds
without those in which the rank waited for others or for data.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.curves import busy_seconds
from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.forecast import forecast_of, present_ranks
from shoal.dashboard.views.overview import rank_places
from shoal.dashboard.views.plain import finite, text

Floats = npt.NDArray[np.float64]

SCORED_STEPS = 20
"""Steps that a score looks back on."""
_MOST_NUMBERS = 12_000
"""In the four tables of an answer together: the rest of 200 KB is for what each rank has once."""
_MOST_RANKS = 256
_AXES = ("islands", "pp", "dp", "cp", "tp", "ep")


def ranks_answer(run: Run, *, first: float | None = None, last: float | None = None, bins: int = 120) -> dict[str, Any]:
    """Ranks by steps: ``/api/run/ID/ranks``.

    Args:
        run: whose.
        first: the first step; None for all.
        last: the last step; None for all.
        bins: into how many columns steps are put at most.
    """
    # Servers do what workers wait for: the two are not compared.
    files = [file for file in run.ranks if "work" in file.tables] or [file for file in run.ranks if file.steps.rows]
    shown = files[:_MOST_RANKS]
    tables = {file.rank: _steps_of(run, file, first, last) for file in shown}
    edges = _edges([steps for steps, _ in tables.values()], _fitting(bins, len(shown)))
    binned: dict[str, list[list[float | None]]] = {name: [] for name in ("busy", "step", "data", "wait")}
    for steps, values in tables.values():
        for name, row in binned.items():
            row.append(_means(steps, values[name], edges))
    phases, waits = _names(shown, "phase:"), _names(shown, "wait:")
    return {
        "ranks": [file.rank for file in shown],
        "left_out": len(files) - len(shown),
        "bins": [[int(one), int(other) - 1] for one, other in pairwise(edges)],
        **binned,
        "phases": [text(name, 100) for name in phases[:40]],
        "phase_seconds": [_last_means(file, [f"phase:{name}" for name in phases[:40]]) for file in shown],
        "waits": [text(name, 100) for name in waits[:20]],
        "wait_seconds": [_last_means(file, [f"wait:{name}" for name in waits[:20]]) for file in shown],
        "scores": scores({rank: values["busy"] for rank, (_, values) in tables.items() if rank is not None}),
        "memory": memory(run),
        "traffic": traffic(run),
        "mesh": mesh(run),
    }


def _names(files: list[EventFile], prefix: str) -> list[str]:
    every = (name for file in files for name in file.timed.names if name.startswith(prefix))
    return list(dict.fromkeys(name[len(prefix) :] for name in every))


def _fitting(bins: int, ranks: int) -> int:
    return max(1, min(bins, 400, _MOST_NUMBERS // (4 * max(ranks, 1))))


def _steps_of(run: Run, file: EventFile, first: float | None, last: float | None) -> tuple[Floats, dict[str, Floats]]:
    """The steps of a rank within limits, and what each took."""
    axis = run.curves.axis(file)
    table = file.timed

    def pick(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if axis.rows is None else values[axis.rows]

    left = 0 if first is None else int(np.searchsorted(axis.step, first, side="left"))
    right = len(axis.step) if last is None else int(np.searchsorted(axis.step, last, side="right"))
    seconds, data, busy = pick(table.column("seconds")), pick(table.column("data_seconds")), pick(busy_seconds(table))
    values = {"step": seconds, "data": data, "busy": busy, "wait": np.maximum(seconds - data - busy, 0.0)}
    return axis.step[left:right], {name: column[left:right] for name, column in values.items()}


def _edges(steps: list[Floats], bins: int) -> list[int]:
    """Borders of columns of equal widths, in whole steps; the last one is after the last step."""
    ends = [(int(one[0]), int(one[-1])) for one in steps if len(one)]
    if not ends:
        return [0]
    first, last = min(one for one, _ in ends), max(other for _, other in ends)
    width = -(-(last - first + 1) // bins)
    return [*range(first, last + 1, width), last + 1]


def _means(steps: Floats, values: Floats, edges: list[int]) -> list[float | None]:
    places = np.searchsorted(steps, edges)
    found: list[float | None] = []
    for left, right in pairwise(places.tolist()):
        window = values[left:right]
        window = window[np.isfinite(window)]
        found.append(float(f"{window.mean():.4g}") if len(window) else None)
    return found


def _last_means(file: EventFile, columns: list[str]) -> list[float | None]:
    found: list[float | None] = []
    for name in columns:
        window = file.timed.column(name)[-SCORED_STEPS:]
        window = window[np.isfinite(window)]
        found.append(float(f"{window.mean():.4g}") if len(window) else None)
    return found


def scores(busy: dict[int, Floats]) -> list[dict[str, Any]]:
    """How much busier each rank is than the others, the busiest first: 1 is as busy as they are.

    Middles of the last steps are compared: a step in which its machine held a rank up does not make it a slow rank.

    Args:
        busy: seconds of each step, by rank.
    """
    middles = {}
    for rank, values in busy.items():
        recent = values[-SCORED_STEPS:]
        recent = recent[np.isfinite(recent)]
        if len(recent):
            middles[rank] = float(np.median(recent))
    ordered = np.sort(np.array(list(middles.values())))
    found = []
    for rank, middle in middles.items():
        others = np.delete(ordered, int(np.searchsorted(ordered, middle)))
        usual = float(np.median(others)) if len(others) else middle
        best = _best_of(busy[rank])
        found.append(
            {
                "rank": rank,
                "score": finite(middle / usual) if usual > 0 else None,
                "against_own": finite(middle / best) if best else None,
                "busy_seconds": middle,
            }
        )
    return sorted(found, key=lambda one: (-(one["score"] or 0.0), one["rank"]))[:_MOST_RANKS]


def _best_of(values: Floats) -> float | None:
    """The least middle of as many steps as are scored, of the steps so far."""
    whole = len(values) // SCORED_STEPS * SCORED_STEPS
    if whole == 0:
        return float(np.median(values)) if len(values) else None
    return float(np.median(values[:whole].reshape(-1, SCORED_STEPS), axis=1).min())


def memory(run: Run) -> list[dict[str, Any]]:
    """Where each rank's memory is, beside what was forecast."""
    predicted = (forecast_of(run) or {}).get("memory_bytes")
    found = []
    for file in present_ranks(run)[:_MOST_RANKS]:
        table = file.tables.get("memory")
        expected = predicted.get(str(file.rank)) if isinstance(predicted, dict) else None
        if table is None and not isinstance(expected, dict):
            continue
        measured = {} if table is None else {name: finite(table.last(column)) for name, column in _PARTS.items()}
        asked = expected if isinstance(expected, dict) else None
        found.append(
            {
                "rank": file.rank,
                "measured": measured,
                "predicted": None if asked is None else {text(key, 40): finite(value) for key, value in asked.items()},
            }
        )
    return found


_PARTS = {
    "weights": "weights_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "other": "other_bytes",
    "rss": "rss_bytes",
    "peak": "peak_rss_bytes",
}


def traffic(run: Run) -> list[dict[str, Any]]:
    """What crossed between ranks since the last start, by axis and operation, of all ranks together, beside the forecast."""
    summed: dict[str, list[float]] = {}
    expected: dict[str, float] = {}
    per_step = (forecast_of(run) or {}).get("traffic")
    for file in present_ranks(run):
        events = file.events("axis_traffic")
        if not events or not isinstance(events[-1].get("rows"), dict):
            continue
        for name, row in events[-1]["rows"].items():
            numbers = [as_number(value) for value in row[:3]] if isinstance(row, list) else []
            if len(numbers) == 3 and np.isfinite(numbers).all():
                old = summed.setdefault(name, [0.0, 0.0, 0.0])
                summed[name] = [one + other for one, other in zip(old, numbers, strict=True)]
        steps = as_number(events[-1].get("step")) - _first_step(file)
        own = per_step.get(str(file.rank)) if isinstance(per_step, dict) else None
        for name, row in (own if isinstance(own, dict) else {}).items():
            if isinstance(row, list) and len(row) >= 2 and np.isfinite(as_number(row[1]) * steps):
                expected[name] = expected.get(name, 0.0) + as_number(row[1]) * steps
    found = []
    for name in list(dict.fromkeys([*summed, *expected]))[:200]:
        axis, _, operation = name.partition(" ")
        calls, sent, seconds = summed.get(name, [0.0, 0.0, 0.0])
        found.append(
            {
                "axis": text(axis, 100),
                "operation": text(operation, 100),
                "calls": int(calls),
                "bytes": int(sent),
                "seconds": finite(seconds),
                "forecast_bytes": int(expected[name]) if name in expected else None,
            }
        )
    return found


def _first_step(file: EventFile) -> float:
    """Steps that were done before the rank's last start."""
    starts = file.events("run_started")
    return as_number(starts[-1].get("step")) if starts else 0.0


def mesh(run: Run) -> dict[str, Any]:
    """The axes of the plan, and where each rank is on them, on which host, and how it is."""
    axes = []
    for name in _AXES:
        size = run.plan.get(name)
        if isinstance(size, int) and size > 1:
            axes.append([name, size])
    states: dict[object, str] = {}
    live = (run.live or {}).get("ranks")
    for one in live if isinstance(live, list) else ():
        if isinstance(one, dict) and isinstance(one.get("rank"), int):
            states[one["rank"]] = text(one.get("state", ""), 20)
    places = [{**place, "state": states.get(place["rank"], "")} for place in rank_places(run)]
    return {"axes": axes, "places": places}
