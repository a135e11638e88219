"""The metrics of runs, taken from what is known of them: each is a sum, a count or the last value of something in the events."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.dashboard.exporters.families import (
    STALENESS_BOUNDS,
    STEP_BOUNDS,
    Buckets,
    Snapshot,
    count_in_buckets,
)
from shoal.dashboard.runs.columns import Column, Table, as_number
from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.forecast import forecast_of

_MEMORY = {
    "weights": "weights_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "other": "other_bytes",
    "resident": "rss_bytes",
    "peak": "peak_rss_bytes",
}
_STATUS_UP = ("running",)


@dataclass(frozen=True)
class Watched:
    """A run and what it is called outside."""

    name: str
    run: Run
    kind: str
    """training, servers or simulated."""
    status: str


def collect(watched: Iterable[Watched], now: float) -> Snapshot:
    """The metrics of runs at a moment of wall-clock time."""
    found = Snapshot()
    for one in watched:
        _about(found, one)
        lead = one.run.lead()
        if lead is not None:
            _steps(found, one.name, lead)
        for file in one.run.ranks:
            _of_rank(found, one.name, file)
        _ranks_up(found, one)
        _events(found, one, now)
    return found


def _about(found: Snapshot, one: Watched) -> None:
    plan = one.run.plan
    started = one.run.events("run_started")
    world = plan.get("world_size") or (started[-1].get("world_size") if started else None)
    labels = {"plan": str(plan.get("plan", ""))[:500], "kind": one.kind, "status": one.status}
    found.add("shoal_run_info", one.name, 1.0, **labels, world_size=str(world or "")[:20])
    found.add("shoal_run_running", one.name, float(one.status in _STATUS_UP))
    found.add("shoal_planned_steps", one.name, _known(plan.get("total_steps")))
    found.add("shoal_predicted_step_seconds", one.name, _known((forecast_of(one.run) or {}).get("step_seconds")))
    if started:
        found.begins[one.name] = float(started[0]["t"])
        # Processes of parameter servers count their own restarts; of ranks all begin again together.
        found.add("shoal_restarts_total", one.name, max(as_number(event.get("generation")) for event in started))


def _steps(found: Snapshot, name: str, lead: EventFile) -> None:
    table = lead.steps
    found.add("shoal_step", name, table.last("step"))
    found.add("shoal_steps_total", name, table.rows)
    for metric, column in (
        ("shoal_skipped_steps_total", "skipped"),
        ("shoal_samples_total", "samples"),
        ("shoal_tokens_total", "tokens"),
    ):
        found.add(metric, name, float(table.column(column).sum(dtype=np.float64)))
    found.add("shoal_train_loss", name, table.last("loss"))
    found.add("shoal_learning_rate", name, table.last("lr"))
    # Where nobody has the whole gradient the events have null, which is no norm that was not finite.
    found.add("shoal_gradient_norm", name, _known(table.last("grad_norm")))
    durations = count_in_buckets(table.column("seconds"), STEP_BOUNDS)
    if durations is not None:
        found.add_histogram("shoal_step_duration_seconds", name, durations)


def _of_rank(found: Snapshot, name: str, file: EventFile) -> None:
    rank, table = str(file.rank), file.timed
    for column in table.names:
        kind, colon, rest = column.partition(":")
        if colon and kind == "phase":
            found.add("shoal_busy_seconds_total", name, _sum(table, column), rank=rank, phase=rest)
        if colon and kind == "wait":
            found.add("shoal_wait_seconds_total", name, _sum(table, column), rank=rank, axis=rest)
    if table.rows and "wait:data" not in table:
        found.add("shoal_wait_seconds_total", name, _sum(table, "data_seconds"), rank=rank, axis="data")
    if "memory" in file.tables:
        for part, column in _MEMORY.items():
            value = _known(file.tables["memory"].last(column))
            found.add("shoal_memory_bytes", name, value, rank=rank, part=part)
    _traffic(found, name, file)


def _traffic(found: Snapshot, name: str, file: EventFile) -> None:
    """What crossed since the process began: a restart begins again at 0, as counters do."""
    events = file.events("axis_traffic")
    rows = events[-1].get("rows") if events else None
    if not isinstance(rows, dict):
        return
    for key, row in rows.items():
        axis, _, operation = str(key).partition(" ")
        if isinstance(row, list) and len(row) == 3:
            for metric, value in zip(("calls", "bytes", "seconds"), row, strict=True):
                labels = {"rank": str(file.rank), "axis": axis[:50], "op": operation[:50]}
                found.add(f"shoal_comm_{metric}_total", name, _known(value), **labels)


def _ranks_up(found: Snapshot, one: Watched) -> None:
    hosts = {str(event["rank"]): str(event.get("host", "")) for event in one.run.events("placed")}
    seen = set()
    for row in live_rows(one.run.live):
        rank = str(row.get("name", row.get("rank", "")))[:100]
        if rank not in seen:
            seen.add(rank)
            is_up = one.status in _STATUS_UP and row.get("state") == "running"
            host = str(row.get("host") or hosts.get(str(row.get("rank")), ""))[:200]
            found.add("shoal_rank_up", one.name, float(is_up), rank=rank, host=host)
    if seen:
        return
    for file in one.run.ranks:
        has_ended = bool(file.events("run_ended"))
        is_up = one.status in _STATUS_UP and not has_ended
        labels = {"rank": str(file.rank), "host": hosts.get(str(file.rank), "")[:200]}
        found.add("shoal_rank_up", one.name, float(is_up), **labels)


def live_rows(live: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The ranks of a live.json, whatever else it holds."""
    rows = live.get("ranks") if live is not None else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _events(found: Snapshot, one: Watched, now: float) -> None:
    counts: Counter[str] = Counter()
    late: Counter[int] = Counter()
    lead = one.run.lead()
    # All ranks evaluate: the one whose steps stand for the run says it first.
    for file in sorted(one.run.files.values(), key=lambda file: file is not lead):
        counts["step"] += file.steps.rows
        counts["spans"] += len(file.spans)
        counts.update({kind: kept.count for kind, kept in file.kept.items()})
        for of_worker in file.staleness.values():
            late.update(of_worker)
        for key, table in file.tables.items():
            kind, _, split = key.partition(":")
            if kind == "evaluated":
                found.add("shoal_validation_loss", one.name, table.last("loss"), split=split)
    for kind, count in sorted(counts.items()):
        if count:
            found.add("shoal_events_total", one.name, count, event=kind[:100])
    found.add("shoal_broken_lines_total", one.name, one.run.broken_lines + one.run.long_lines)
    saved = one.run.events("checkpoint_saved")
    if saved:
        found.add("shoal_checkpoint_age_seconds", one.name, max(0.0, now - float(saved[-1]["t"])))
        found.add("shoal_checkpoint_bytes", one.name, _known(saved[-1].get("num_bytes")))
    views = one.run.events("view")
    if views:
        found.add("shoal_view_epoch", one.name, _known(views[-1].get("epoch")))
    if late:
        found.add_histogram("shoal_staleness_updates", one.name, _late_buckets(late))


def _late_buckets(late: Counter[int]) -> Buckets:
    counts = [0] * (len(STALENESS_BOUNDS) + 1)
    for updates, count in late.items():
        counts[int(np.searchsorted(STALENESS_BOUNDS, updates, side="left"))] += count
    return Buckets(
        bounds=STALENESS_BOUNDS,
        counts=tuple(counts),
        total=float(sum(updates * count for updates, count in late.items())),
        smallest=float(min(late)),
        largest=float(max(late)),
    )


def _sum(table: Table, column: str) -> float:
    values: Column = table.column(column)
    return float(np.nansum(values, dtype=np.float64))


def _known(value: object) -> float | None:
    """A number; None for what is none, or not finite."""
    found = as_number(value)
    return found if np.isfinite(found) else None
