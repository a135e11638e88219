"""Lines of an event file to columns of steps and a few other tables, and everything else to events.

Steps are most of a file, so they alone are decoded into a typed value; a line of another kind is decoded as it is and checked.
A line that is no event is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from shoal.dashboard.runs.columns import Column, as_number, numbers
from shoal.telemetry.eventlog import KNOWN_KINDS, is_event

_STEP_MARK = b'"kind": "step"'
LATEST_TIME = 1e11
"""Seconds since 1970, in the year 5138: a time beyond is no time."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=LATEST_TIME)]
_Number = float | Literal["nan", "inf", "-inf"] | None


class _Step(msgspec.Struct, gc=False, tag_field="kind", tag="step"):
    """What is read of a step; fields that a newer version has are passed over."""

    t: _Time
    step: _Count
    loss: _Number
    lr: _Number
    grad_norm: _Number
    samples: _Count
    tokens: _Count
    seconds: float
    data_seconds: float
    skipped: bool = False
    loss_scale: _Number = 1.0
    wait_seconds: dict[str, float] | None = None
    phases: dict[str, float] | None = None


@dataclass(frozen=True)
class Other:
    """An event that is no step."""

    event: dict[str, Any]
    start: int
    """Where its line begins in the file."""
    length: int
    is_known: bool
    """Of a kind that this version writes."""


@dataclass
class Decoded:
    """What lines hold."""

    steps: dict[str, Column] = field(default_factory=dict)
    num_steps: int = 0
    others: list[Other] = field(default_factory=list)
    broken: int = 0
    """Lines that are no events."""


_decode_step = msgspec.json.Decoder(_Step).decode
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode
_ERRORS = (ValueError, RecursionError)


def decode(data: bytes, start: int) -> Decoded:
    """Decode whole lines.

    Args:
        data: the lines.
        start: where they begin in the file.
    """
    found = Decoded()
    lines = data.split(b"\n")
    marked = [line for line in lines if _STEP_MARK in line]
    try:
        steps = [_decode_step(line) for line in marked]
        is_clean = True
    except _ERRORS:
        is_clean, steps = False, []
    if not is_clean or len(marked) + 1 < len(lines):
        at = start
        for line in lines:
            is_marked = _STEP_MARK in line
            if is_marked and not is_clean:
                try:
                    steps.append(_decode_step(line))
                except _ERRORS:
                    _take_other(found, steps, line, at)
            elif line and not is_marked:
                _take_other(found, steps, line, at)
            at += len(line) + 1
    if steps:
        found.steps, found.num_steps = _columns_of(steps), len(steps)
    return found


def _take_other(found: Decoded, steps: list[_Step], line: bytes, at: int) -> None:
    try:
        event = _decode_any(line)
        if event.get("kind") == "step":
            # Written with other blanks, or no step after all.
            steps.append(_decode_step(line))
            return
    except _ERRORS:
        found.broken += bool(line.strip())
        return
    if is_event(event) and 0 <= event["t"] <= LATEST_TIME and isinstance(event.get("kind"), str):
        found.others.append(Other(event, at, len(line), event["kind"] in KNOWN_KINDS))
    else:
        found.broken += 1


def _columns_of(steps: Sequence[_Step]) -> dict[str, Column]:
    count = len(steps)
    columns: dict[str, Column] = {
        "t": np.fromiter([step.t for step in steps], np.float64, count),
        "step": np.fromiter([step.step for step in steps], np.int64, count),
        "loss": numbers([step.loss for step in steps]),
        "lr": numbers([step.lr for step in steps]),
        "grad_norm": numbers([step.grad_norm for step in steps]),
        "samples": np.fromiter([step.samples for step in steps], np.int64, count),
        "tokens": np.fromiter([step.tokens for step in steps], np.int64, count),
        "seconds": np.fromiter([step.seconds for step in steps], np.float64, count),
        "data_seconds": np.fromiter([step.data_seconds for step in steps], np.float64, count),
        "loss_scale": numbers([step.loss_scale for step in steps]),
        "skipped": np.fromiter([step.skipped for step in steps], np.int8, count),
    }
    _add_named(columns, "wait", [step.wait_seconds for step in steps])
    _add_named(columns, "phase", [step.phases for step in steps])
    return columns


def _add_named(columns: dict[str, Column], prefix: str, values: Sequence[dict[str, float] | None]) -> None:
    """A column for each name in dictionaries, most of which have the same names."""
    if not any(values):
        return
    with np.errstate(over="ignore"):
        _add_columns(columns, prefix, values)


def _add_columns(columns: dict[str, Column], prefix: str, values: Sequence[dict[str, float] | None]) -> None:
    first = next(value for value in values if value)
    names = list(first)
    if all(value is not None and list(value) == names for value in values):
        table = np.array([tuple(value.values()) for value in values if value is not None], np.float32)
        columns.update({f"{prefix}:{name}": table[:, place] for place, name in enumerate(names)})
        return
    every = dict.fromkeys(name for value in values if value for name in value)
    for name in list(every)[:256]:
        # Of a step that says its phases and not this one, none of it was done.
        row = [float("nan") if value is None else value.get(name, 0.0) for value in values]
        columns[f"{prefix}:{name}"] = np.array(row, np.float32)


TABLES: dict[str, tuple[str, ...]] = {
    "memory": (
        "step", "weights_bytes", "gradient_bytes", "optimizer_bytes", "other_bytes", "rss_bytes", "peak_rss_bytes"
    ),
    "round": ("step", "round", "seconds", "distance"),
    "islands": ("step", "distance"),
    "queues": ("step", "todo", "in_hand", "waiting", "unapplied"),
    "exchange": ("step", "sent_bytes", "dense_bytes", "residual_norm"),
    "adapted": ("step", "rate_factor", "noise_scale", "batch", "progress"),
    "drift": ("step", "stability", "loss_shift"),
    "data_cache": (
        "memory_hits", "disk_hits", "fetches", "fetched_bytes", "fetch_seconds", "wait_seconds", "memory_bytes", "disk_bytes"
    ),
}  # fmt: skip
"""Kinds whose numbers are kept of every event, however many there are, and which."""


def table_row(event: dict[str, Any]) -> dict[str, float] | None:
    """What a table of the event's kind keeps of it; None for a kind that has none."""
    kind = event["kind"]
    if kind in TABLES:
        return {"t": as_number(event["t"]), **{name: as_number(event.get(name)) for name in TABLES[kind]}}
    if kind == "evaluated":
        metrics = event.get("metrics")
        named = _named("metric", metrics) if isinstance(metrics, dict) else {}
        own = {name: as_number(event.get(name)) for name in ("step", "loss", "accuracy", "samples", "seconds")}
        return {"t": as_number(event["t"]), **own, **named}
    if kind == "log" and isinstance(event.get("values"), dict):
        own = {"t": as_number(event["t"]), "step": as_number(event.get("step"))}
        return own | _named("value", event["values"])
    if kind == "work":
        waits, phases = (
            values if isinstance(values := event.get(name), dict) else {} for name in ("wait_seconds", "phases")
        )
        own = {name: as_number(event.get(name)) for name in ("step", "samples", "seconds", "data_seconds")}
        return {"t": as_number(event["t"]), **own, **_named("wait", waits), **_named("phase", phases)}
    if kind == "update":
        late = [as_number(value) for value in event["staleness"]] if isinstance(event.get("staleness"), list) else []
        own = {name: as_number(event.get(name)) for name in ("update", "step", "lr", "num_duplicates")}
        return {"t": as_number(event["t"]), **own, "staleness": max(late, default=0.0), "gradients": float(len(late))}
    return None


def _named(prefix: str, values: dict[str, Any]) -> dict[str, float]:
    """Values by name. In a column NaN means that an event has no such value, so one that is NaN becomes infinite."""
    found = {f"{prefix}:{name}": as_number(value) for name, value in list(values.items())[:256]}
    return {name: float("inf") if value != value else value for name, value in found.items()}
