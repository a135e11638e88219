"""The curves of a run: which there are, and each as values over steps, samples, tokens and time, at every zoom."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.dashboard.runs.columns import Column, Growing, Rows, Table, rows_that_count
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


def _ratio(above: str, below: str) -> Callable[[Table | Rows], Floats]:
    def values(table: Table | Rows) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = table.column(above) / table.column(below)
        return found

    return values


def _column(name: str) -> Callable[[Table | Rows], Floats]:
    return lambda table: table.column(name).astype(np.float64, copy=False)


def busy_seconds(table: Table | Rows) -> Floats:
    """What a rank worked in each step: its seconds without those that it waited, for others or for data."""
    waits = [table.column(name) for name in table.names if name.startswith("wait:")]
    waited = np.nansum(waits, axis=0) if waits else 0.0
    return np.maximum(table.column("seconds") - waited - table.column("data_seconds"), 0.0)


_STEP_CURVES: dict[str, tuple[str, bool, Callable[[Table | Rows], Floats]]] = {
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


def _is_known(name: str, steps: Table | Rows) -> bool:
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


class Axis:
    """Where the steps of a rank are on every axis, of rows that count only; it grows with them.

    Time counts from the begin of the first step and never goes back, whatever the clock did.

    Args:
        repeats: several rows of a step all count: a worker of parameter servers may have several shares of it.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self._repeats = repeats
        self._begin()

    def _begin(self) -> None:
        self._columns = {name: Growing(np.empty(0)) for name in AXES}
        self._rows: Growing | None = None
        self._taken, self._latest = 0, -np.inf
        self.start = 0.0
        """When time is 0."""

    def follow(self, table: Table) -> int:
        """Take the rows that are new; how many that were there before still count as they did."""
        same = len(self.step)
        if self._taken == 0 and table.rows:
            self.start = float(table.column("t")[0] - table.column("seconds")[0])
        steps = table.since(self._taken).column("step")
        last = self.step[-1] if same else -np.inf
        goes_on = np.greater_equal if self._repeats else np.greater
        if len(steps) and not (goes_on(steps[0], last) and bool(goes_on(steps[1:], steps[:-1]).all())):
            # Steps are done again: what was written beyond them does not count any more.
            rows = rows_that_count(table.column("step"), repeats=self._repeats)
            rows = np.arange(table.rows) if rows is None else rows
            known = self.rows if self.rows is not None else np.arange(same)
            most = min(len(known), len(rows))
            differs = np.flatnonzero(known[:most] != rows[:most])
            same = int(differs[0]) if len(differs) else most
            self._begin()
            self.start = float(table.column("t")[0] - table.column("seconds")[0])
            self._rows = Growing(rows)
            self._add(table.since(0), rows)
        elif len(steps):
            if self._rows is not None:
                self._rows.extend(np.arange(self._taken, table.rows))
            self._add(table.since(self._taken), None)
        self._taken = table.rows
        return same

    def _add(self, fresh: Rows, rows: Column | None) -> None:
        # Of rows as they were written: a clock that was set back holds time still until it is where it was.
        times = np.maximum.accumulate(np.maximum(fresh.column("t"), self._latest))
        self._latest = float(times[-1])
        for name in AXES:
            values = times if name == "time" else fresh.column(name)
            values = (values if rows is None else values[rows]).astype(np.float64)
            column = self._columns[name]
            if name == "time":
                values = np.maximum(values - self.start, 0.0)
            elif name != "step":
                values = np.cumsum(values) + (column.values[-1] if column.size else 0.0)
            column.extend(values)

    @property
    def rows(self) -> npt.NDArray[np.int64] | None:
        """Of the table; None for all."""
        return None if self._rows is None else self._rows.values

    @property
    def step(self) -> Floats:
        """The steps that count."""
        return self.of("step")

    def of(self, name: str) -> Floats:
        """By the axis's name."""
        found: Floats = self._columns[name].values
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
        place = np.searchsorted(self.of("time"), times - self.start, side="right")
        return np.where(place > 0, self.step[np.maximum(place - 1, 0)], 0.0)


@dataclass
class Curve:
    """A curve with its buckets."""

    pyramid: Pyramid
    axes: dict[str, Floats]

    def window(self, axis: str, first: float | None, last: float | None, points: int) -> tuple[Floats, Buckets, bool]:
        """The buckets between two places of an axis, both included, and where they are."""
        places = self.axes[axis]
        left = 0 if first is None else int(np.searchsorted(places, first, side="left"))
        right = len(places) if last is None else int(np.searchsorted(places, last, side="right"))
        buckets, middles, exact = self.pyramid.cut(left, right, points)
        return places[middles] if len(middles) else np.empty(0), buckets, exact


@dataclass
class _Kept:
    """A curve that was asked for, and of which rows it is."""

    table: Table
    rows: tuple[int, int]
    """Of the table, and of the table of steps."""
    curve: Curve | None
    """None where no row has a value of this name."""
    version: int = 0
    """Of the axis, when it was put together."""


class _KeptAxis:
    """The axis of a table, and what has changed in it."""

    def __init__(self, table: Table, *, repeats: bool) -> None:
        self.table, self.axis = table, Axis(repeats=repeats)
        self._shortened: list[int] = []
        """Of each time that rows were taken back, how many were not."""

    def follow(self) -> None:
        before = len(self.axis.step)
        same = self.axis.follow(self.table)
        if same < before:
            self._shortened.append(same)

    @property
    def version(self) -> int:
        return len(self._shortened)

    def same_since(self, version: int, count: int) -> int:
        """Of ``count`` values of a version, how many still stand where they stood."""
        return min([count, *self._shortened[version:]])


class Curves:
    """The curves of a run that were asked for, put together once and prolonged by what is new.

    Args:
        most: curves that are kept; the one that was asked for longest ago goes first.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._kept: dict[tuple[str, int | None], _Kept] = {}
        self._axes: dict[int | None, _KeptAxis] = {}

    def axis(self, file: EventFile) -> Axis:
        """The axes of a rank's steps."""
        return self._axis(file).axis

    def _axis(self, file: EventFile) -> _KeptAxis:
        found = self._axes.get(file.rank)
        if found is None or found.table is not file.timed:
            found = self._axes[file.rank] = _KeptAxis(file.timed, repeats=file.timed is not file.steps)
        found.follow()
        return found

    def get(self, file: EventFile, name: str) -> Curve | None:
        """A curve of a rank; None where it has none of this name."""
        key = (name, file.rank)
        is_of_steps = name in _STEP_CURVES or (name in file.timed and ":" in name)
        if is_of_steps:
            table = file.timed
            if not table.rows:
                return None
        else:
            found = _table_values(file, name)
            if found is None:
                return None
            table = found[0]
        known = self._kept.pop(key, None)
        if known is None or known.table is not table:
            known = None
        if known is None or known.rows != (table.rows, file.timed.rows):
            known = self._of_steps(file, name, known) if is_of_steps else self._of_table(file, name)
        self._kept[key] = known
        while len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return known.curve

    def _of_steps(self, file: EventFile, name: str, known: _Kept | None) -> _Kept:
        """A value for each step: those that are new are added to those that there are."""
        rows = (file.timed.rows, file.timed.rows)
        if (known is None or known.curve is None) and not _is_known(
            name, file.timed.since(known.rows[0] if known is not None else 0)
        ):
            return _Kept(file.timed, rows, None)
        kept = self._axis(file)
        axis = kept.axis
        pyramid = Pyramid() if known is None or known.curve is None else known.curve.pyramid
        if known is not None and len(pyramid.values):
            pyramid.shorten(kept.same_since(known.version, len(pyramid.values)))
        values = _STEP_CURVES[name][2] if name in _STEP_CURVES else _column(name)
        have = len(pyramid.values)
        if axis.rows is None:
            pyramid.extend(values(file.timed.since(have)))
        elif have < len(axis.rows):
            fresh = axis.rows[have:]
            pyramid.extend(values(file.timed.since(int(fresh[0])))[fresh - fresh[0]])
        return _Kept(file.timed, rows, Curve(pyramid, {each: axis.of(each) for each in AXES}), kept.version)

    def _of_table(self, file: EventFile, name: str) -> _Kept:
        """Values of a table of their own, placed by their steps."""
        found = _table_values(file, name)
        assert found is not None, "it was there a moment ago"
        table, values = found
        axis = self.axis(file)
        # Whoever has no step of its own is placed by the clock.
        steps = table.column("step") if "step" in table else axis.step_at(table.column("t"))
        keep = np.flatnonzero(np.logical_not(np.isnan(values)) & np.isfinite(steps))
        counted = rows_that_count(steps[keep], repeats=True)
        keep = keep if counted is None else keep[counted]
        pyramid = Pyramid()
        pyramid.extend(values[keep])
        places = {each: axis.at(steps[keep], each) for each in AXES}
        return _Kept(table, (table.rows, file.timed.rows), Curve(pyramid, places))
