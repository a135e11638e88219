"""Runs beside each other: what differs in their recipes and plans, and the first step at which they differ, and in what."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.overview import run_row
from shoal.dashboard.views.plain import finite, jsonable, text

MOST_RUNS = 8
_MOST_KEYS = 300
# The order in which a difference shows: the loss is computed before the gradient, and the gradient before the update.
_COMPARED = (("loss", "loss"), ("grad_norm", "gradient norm"), ("lr", "learning rate"), ("samples", "samples"))


def compare_answer(runs: Sequence[Run], now: float) -> dict[str, Any]:
    """Several runs: ``/api/compare``; everything is in the order in which they were asked for."""
    return {
        "ids": [run.id for run in runs],
        "names": [text(run.name, 300) for run in runs],
        "recipe": _differences([flatten(_recipe(run)) for run in runs]),
        "plan": _differences([flatten(run.plan) for run in runs]),
        "first_difference": first_difference(runs),
        "common_steps": _common_steps(runs),
        "summary": [_summary(run_row(run, now)) for run in runs],
    }


def _recipe(run: Run) -> dict[str, Any]:
    try:
        return tomllib.loads(run.recipe)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def flatten(values: Mapping[str, Any], prefix: str = "", depth: int = 8) -> dict[str, Any]:
    """Nested tables by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and depth:
            found.update(flatten(value, f"{prefix}{key}.", depth - 1))
        else:
            found[f"{prefix}{key}"] = value
    return found


def _differences(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys that not all have alike; null for one that a run does not have."""
    keys = list(dict.fromkeys(key for one in values for key in one))
    found = []
    for key in keys:
        given = [one.get(key) for one in values]
        # 1 and true, and 1 and 1.0, are equal in Python and are not the same in a recipe.
        if len({json.dumps(value, sort_keys=True, default=str) for value in given}) > 1:
            found.append({"key": text(key, 200), "values": [jsonable(value, 2) for value in given]})
    return found[:_MOST_KEYS]


def _counting(run: Run, file: EventFile) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
    rows = run.curves.axis(file).rows
    columns = {name: file.steps.column(name) for name, _ in _COMPARED}
    steps = file.steps.column("step")
    if rows is None:
        return steps, columns
    return steps[rows], {name: column[rows] for name, column in columns.items()}


def _common_steps(runs: Sequence[Run]) -> int:
    found: npt.NDArray[Any] | None = None
    for run in runs:
        lead = run.lead()
        steps = np.empty(0) if lead is None else _counting(run, lead)[0]
        found = steps if found is None else np.intersect1d(found, steps, assume_unique=True)
    return 0 if found is None else len(found)


def first_difference(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The first step that all runs have and in which not all say the same; None where there is none."""
    given = []
    for run in runs:
        lead = run.lead()
        if lead is None:
            return None
        given.append(_counting(run, lead))
    steps = given[0][0]
    for other, _ in given[1:]:
        steps = np.intersect1d(steps, other, assume_unique=True)
    if not len(steps):
        return None
    places = [np.searchsorted(own, steps) for own, _ in given]
    earliest: tuple[int, int] | None = None
    for order, (column, _) in enumerate(_COMPARED):
        rows = [columns[column][place] for (_, columns), place in zip(given, places, strict=True)]
        # What a run does not know of, such as the norm under parameter servers, is no difference.
        known = np.all([np.logical_not(np.isnan(row)) for row in rows], axis=0) if column == "grad_norm" else True
        differs = np.any([_unlike(row, rows[0]) for row in rows[1:]], axis=0) & known
        at = np.flatnonzero(differs)
        if len(at) and (earliest is None or (int(at[0]), order) < earliest):
            earliest = int(at[0]), order
    if earliest is None:
        return None
    row, order = earliest
    column, what = _COMPARED[order]
    values = [finite(columns[column][place[row]].item()) for (_, columns), place in zip(given, places, strict=True)]
    return {"step": int(steps[row]), "what": what, "values": values}


def _unlike(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    if one.dtype.kind != "f":
        return np.asarray(one != other)
    return np.asarray((one != other) & np.logical_not(np.isnan(one) & np.isnan(other)))


_SHOWN = (
    "id",
    "name",
    "status",
    "plan",
    "world_size",
    "step",
    "loss",
    "validation_loss",
    "tokens_per_s",
    "step_seconds",
)


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in (*_SHOWN, "memory_bytes", "hash", "proof")}
