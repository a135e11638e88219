"""A curve of a run as a chart takes it: buckets, and the ticks of what happened."""

from typing import Any

import numpy as np

from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.curves import AXES, Curve
from shoal.dashboard.runs.pyramid import finite_list
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.plain import text

MOST_POINTS = 1500
_MOST_TICKS = 200


def curve_answer(
    run: Run,
    name: str,
    *,
    axis: str = "step",
    first: float | None = None,
    last: float | None = None,
    points: int = 1000,
    rank: int | None = None,
) -> dict[str, Any] | None:
    """A curve: ``/api/run/ID/curve``; None where the run has none of this name.

    Args:
        run: whose.
        name: of the curve.
        axis: what x is: one of ``AXES``.
        first: the least x; None for all.
        last: the greatest x; None for all.
        points: about how many buckets at most.
        rank: whose values; None for the run's.
    """
    curve = run.curve(name, rank)
    if curve is None or axis not in AXES:
        return None
    # Head and tail of a cut have buckets of their own, so an answer may have a few more than asked for.
    x, buckets, exact = curve.window(axis, first, last, min(max(points, 1), MOST_POINTS))
    unit = next((one.unit for one in run.curve_names() if one.name == name), "")
    shown = {key: finite_list(getattr(buckets, column)) for key, column in _COLUMNS.items()}
    if exact:
        # One value each: said once.
        shown["min"] = shown["max"] = shown["mean"]
    return {
        "name": name,
        "unit": unit,
        "x": finite_list(x),
        **shown,
        "bad": buckets.bad.tolist(),
        "exact": exact,
        "ticks": _ticks(run, curve, axis, x),
    }


_COLUMNS = {"min": "low", "max": "high", "mean": "mean"}


def _ticks(run: Run, curve: Curve, axis: str, x: np.typing.NDArray[np.float64]) -> list[dict[str, Any]]:
    """What happened within the x that are shown, newest last: restarts, failures, checkpoints, changes of who takes part."""
    if not len(x):
        return []
    # What every rank says alike is said once, by the one that stands for the run.
    files = [file for file in (run.lead(), run.files.get("supervisor.jsonl")) if file is not None]
    ticks: list[dict[str, Any]] = []
    for event in (event for file in files for event in file.events(*_TICK_KINDS)):
        kind = event["kind"]
        if kind == "run_started" and not (event.get("generation") or event.get("step")):
            continue
        step = as_number(event.get("step"))
        places = curve.axes["step"]
        if not np.isfinite(step) or not len(places):
            continue
        place = min(int(np.searchsorted(places, step)), len(places) - 1)
        at = float(step if axis == "step" else curve.axes[axis][place])
        if float(x[0]) <= at <= float(x[-1]):
            ticks.append({"x": at, "kind": _TICK_KINDS[kind], "text": text(_tick_text(event), 200)})
    return sorted(ticks, key=lambda tick: tick["x"])[-_MOST_TICKS:]


_TICK_KINDS = {
    "run_started": "restart",
    "rank_failed": "failure",
    "checkpoint_saved": "checkpoint",
    "rolled_back": "rollback",
    "resumed": "resumed",
    "went_back": "rollback",
    "published": "published",
}


def _tick_text(event: dict[str, Any]) -> str:
    kind = event["kind"]
    if kind == "run_started":
        return f"started again at step {event.get('step')} (generation {event.get('generation')})"
    if kind == "rank_failed":
        return f"rank {event.get('culprit_rank')} failed: {event.get('cause')}"
    if kind == "checkpoint_saved":
        return f"checkpoint of step {event.get('step')}"
    if kind == "published":
        return f"version {event.get('version')} was published"
    return f"went on from step {event.get('to_step', event.get('step'))}"
