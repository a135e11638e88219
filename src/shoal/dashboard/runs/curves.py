"""The curves of a run: which there are, and each as values over steps, samples, tokens and time, at every zoom."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.dashboard.runs.columns import Table, rows_that_count
from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.pyramid import Buckets, Floats, Pyramid

AXES = ("step", "samples", "tokens", "time")


@dataclass(frozen=True)
class CurveName:
    """A curve that a run has."""

    name: str
    unit: str
    by_rank: bool
    """Ranks differ in it."""


def _ratio(above: str, below: str) -> Callable[[Table], Floats]:
    def values(table: Table) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = table.column(above) / table.column(below)
        return found

    return values


def _column(name: str) -> Callable[[Table], Floats]:
    return lambda table: table.column(name).astype(np.float64, copy=False)


def busy_seconds(table: Table) -> Floats:
    """What a rank worked in each step: its seconds without those that it waited, for others or for data."""
    waits = [table.column(name) for name in table.names if name.startswith("wait:")]
    waited = np.nansum(waits, axis=0) if waits else 0.0
    return np.maximum(table.column("seconds") - waited - table.column("data_seconds"), 0.0)


_STEP_CURVES: dict[str, tuple[str, bool, Callable[[Table], Floats]]] = {
    "loss": ("", False, _column("loss")),
    "learning_rate": ("", False, _column("lr")),
    "gradient_norm": ("", False, _column("grad_norm")),
    "tokens_per_s": ("tokens/s", False, _ratio("tokens", "seconds")),
    "samples_per_s": ("samples/s", False, _ratio("samples", "seconds")),
    "step_seconds": ("s", True, _column("seconds")),
    "busy_seconds": ("s", True, busy_seconds),
    "data_seconds": ("s", True, _column("data_seconds")),
    "loss_scale": ("", False, _column("loss_scale")),
}
_TABLE_CURVES: dict[str, tuple[str, str, str, bool]] = {
    "memory": ("memory", "rss_bytes", "bytes", True),
    "memory_peak": ("memory", "peak_rss_bytes", "bytes", True),
    "memory_weights": ("memory", "weights_bytes", "bytes", True),
    "memory_gradients": ("memory", "gradient_bytes", "bytes", True),
    "memory_optimizer": ("memory", "optimizer_bytes", "bytes", True),
    "memory_other": ("memory", "other_bytes", "bytes", True),
    "round_seconds": ("round", "seconds", "s", True),
    "round_distance": ("round", "distance", "", False),
    "islands_distance": ("islands", "distance", "", False),
    "staleness": ("update", "staleness", "updates", False),
    "noise_scale": ("adapted", "noise_scale", "samples", False),
    "rate_factor": ("adapted", "rate_factor", "", False),
    "drift_stability": ("drift", "stability", "", False),
    "drift_loss_shift": ("drift", "loss_shift", "", False),
    "cache_fetched": ("data_cache", "fetched_bytes", "bytes", True),
    "cache_wait_seconds": ("data_cache", "wait_seconds", "s", True),
}
"""Curve: table, column, unit, whether ranks differ."""
_OF_THE_RUN = ("loss", "learning_rate", "gradient_norm", "tokens_per_s", "loss_scale")
"""What a worker of parameter servers does not know of the steps that it has shares of."""


def _is_known(name: str, steps: Table) -> bool:
    """False for what no event says: waiting times in older runs, and the norm where nobody has the whole gradient."""
    if name == "busy_seconds":
        return any(column.startswith("wait:") for column in steps.names)
    if name in _OF_THE_RUN and "loss" not in steps:
        return False
    return name != "gradient_norm" or bool(np.isfinite(steps.column("grad_norm")).any())


def curve_names(lead: EventFile) -> list[CurveName]:
    """The curves that there are values of."""
    found = []
    steps = lead.timed
    if steps.rows:
        found += [
            CurveName(name, unit, by_rank)
            for name, (unit, by_rank, _) in _STEP_CURVES.items()
            if _is_known(name, steps)
        ]
        for column in steps.names:
            kind, _, rest = column.partition(":")
            if kind in ("wait", "phase") and rest:
                found.append(CurveName(column, "s", True))
    for name, (source, column, unit, by_rank) in _TABLE_CURVES.items():
        if source in lead.tables and np.isfinite(lead.tables[source].column(column)).any():
            found.append(CurveName(name, unit, by_rank))
    for key, table in lead.tables.items():
        kind, _, split = key.partition(":")
        if kind == "evaluated":
            found.append(CurveName(f"{split}_loss", "", False))
            metrics = [name.partition(":")[2] for name in table.names if name.startswith("metric:")]
            if np.isfinite(table.column("accuracy")).any():
                metrics.insert(0, "accuracy")
            found += [CurveName(f"{split}_{metric}", "", False) for metric in metrics]
        if kind == "log":
            found += [
                CurveName(f"log:{name.partition(':')[2]}", "", False)
                for name in table.names
                if name.startswith("value:")
            ]
    return found


def _table_values(file: EventFile, name: str) -> tuple[Table, Floats] | None:
    """The table that has a curve other than those of every step, and its values."""
    if name in _TABLE_CURVES:
        table_name, column, _, _ = _TABLE_CURVES[name]
        table = file.tables.get(table_name)
        return None if table is None else (table, table.column(column))
    if name.startswith("log:") and "log" in file.tables:
        table = file.tables["log"]
        column = f"value:{name[4:]}"
        return (table, table.column(column)) if column in table else None
    for key, table in file.tables.items():
        kind, _, split = key.partition(":")
        if kind == "evaluated" and name.startswith(f"{split}_"):
            wanted = name[len(split) + 1 :]
            column = wanted if wanted in ("loss", "accuracy") else f"metric:{wanted}"
            if column in table:
                return table, table.column(column)
    return None


@dataclass(frozen=True)
class Axis:
    """Where the steps of a rank are on every axis: rows that count only."""

    step: Floats
    samples: Floats
    tokens: Floats
    time: Floats
    rows: npt.NDArray[np.int64] | None
    """Of the table; None for all."""
    start: float
    """When time is 0."""

    def of(self, name: str) -> Floats:
        """By the axis's name."""
        found: Floats = getattr(self, name)
        return found

    def at(self, steps: Floats, name: str) -> Floats:
        """Where given steps are."""
        if name == "step" or not len(self.step):
            return steps
        place = np.clip(np.searchsorted(self.step, steps, side="left"), 0, len(self.step) - 1)
        return self.of(name)[place]

    def step_at(self, times: Floats) -> Floats:
        """The steps that were done at given times."""
        if not len(self.step):
            return np.zeros(len(times))
        place = np.searchsorted(self.time, times - self.start, side="right")
        return np.where(place > 0, self.step[np.maximum(place - 1, 0)], 0.0)


def axis_of(file: EventFile) -> Axis:
    """The axes of a rank's steps. Time counts from its first step's begin and never goes back, whatever the clock did."""
    table = file.timed
    # A worker may have several shares of a step.
    rows = rows_that_count(table.column("step"), repeats=table is not file.steps)

    def pick(name: str) -> npt.NDArray[Any]:
        values = table.column(name)
        return values if rows is None else values[rows]

    step = pick("step").astype(np.float64)
    # Of rows as they were written: a clock that was set back holds time still until it is where it was.
    time = np.maximum.accumulate(table.column("t")) if table.rows else np.empty(0)
    time = time if rows is None else time[rows]
    start = float(table.column("t")[0] - table.column("seconds")[0]) if table.rows else 0.0
    return Axis(
        step, np.cumsum(pick("samples"), dtype=np.float64), np.cumsum(pick("tokens"), dtype=np.float64),
        np.maximum(time - start, 0.0), rows, start,
    )  # fmt: skip


@dataclass
class Curve:
    """A curve, kept with its buckets while more of it comes."""

    pyramid: Pyramid
    axes: dict[str, Floats]

    def window(self, axis: str, first: float | None, last: float | None, points: int) -> tuple[Floats, Buckets, bool]:
        """The buckets between two places of an axis, both included, and where they are."""
        places = self.axes[axis]
        left = 0 if first is None else int(np.searchsorted(places, first, side="left"))
        right = len(places) if last is None else int(np.searchsorted(places, last, side="right"))
        buckets, middles, exact = self.pyramid.cut(left, right, points)
        return places[middles] if len(middles) else np.empty(0), buckets, exact


class Curves:
    """The curves of a run that were asked for, put together once and prolonged.

    Args:
        most: curves that are kept; the one that was asked for longest ago goes first.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._kept: dict[tuple[str, int | None], tuple[tuple[object, int], Curve]] = {}
        self._axes: dict[int | None, tuple[tuple[object, int], Axis]] = {}

    def axis(self, file: EventFile) -> Axis:
        """The axes of a rank's steps."""
        state = (file.timed, file.timed.rows)
        found = self._axes.get(file.rank)
        if found is None or found[0] != state:
            found = self._axes[file.rank] = (state, axis_of(file))
        return found[1]

    def get(self, file: EventFile, name: str) -> Curve | None:
        """A curve of a rank; None where it has none of this name."""
        key = (name, file.rank)
        is_of_steps = name in _STEP_CURVES or (name in file.timed and ":" in name)
        if is_of_steps:
            table = file.timed
            if not table.rows or not _is_known(name, table):
                return None
        else:
            found = _table_values(file, name)
            if found is None:
                return None
            table = found[0]
        state = (table, table.rows)
        known = self._kept.pop(key, None)
        if known is None or known[0] != state:
            old = known[1] if known is not None and known[0][0] is table else None
            known = (state, self._put_together(file, name, is_of_steps, old))
        self._kept[key] = known
        while len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return known[1]

    def _put_together(self, file: EventFile, name: str, is_of_steps: bool, old: Curve | None) -> Curve:
        axis = self.axis(file)
        if is_of_steps:
            values = _STEP_CURVES[name][2](file.timed) if name in _STEP_CURVES else _column(name)(file.timed)
            values = values if axis.rows is None else values[axis.rows]
            axes, counted = {each: axis.of(each) for each in AXES}, axis.rows
        else:
            found = _table_values(file, name)
            assert found is not None, "it was there a moment ago"
            table, values = found
            # Whoever has no step of its own is placed by the clock.
            steps = table.column("step") if "step" in table else axis.step_at(table.column("t"))
            keep = np.flatnonzero(np.logical_not(np.isnan(values)) & np.isfinite(steps))
            counted = rows_that_count(steps[keep], repeats=True)
            keep = keep if counted is None else keep[counted]
            values, steps = values[keep], steps[keep]
            axes = {each: axis.at(steps, each) for each in AXES}
        pyramid = old.pyramid if old is not None else Pyramid()
        before = len(pyramid.values)
        # Where no row was ever taken back, what was there is how the new values begin.
        pyramid.replace(values, kept=before if counted is None else 0)
        return Curve(pyramid, axes)
