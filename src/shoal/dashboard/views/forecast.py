"""What a run was expected to cost, put together from what its ranks said at its newest start.

Each rank tells its own part when it begins, the first one all of it where the plan was rehearsed; a run that has told nothing yet
may have what the rehearsal left beside it.
"""

from typing import Any

from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.run import Run
from shoal.telemetry.measurements import Forecast, read_rehearsal

_OF_ALL = ("source", "step_seconds", "bubble")
_BY_RANK = ("memory_bytes", "traffic")


def present_ranks(run: Run) -> list[EventFile]:
    """The event files of the ranks that the newest start has: files of a larger start before it stay where they are."""
    starts = [event for file in run.ranks for event in file.events("run_started")]
    newest = max(starts, key=lambda event: as_number(event["t"]), default={})
    size = newest.get("world_size")
    if not isinstance(size, int) or size < 1:
        return run.ranks
    return [file for file in run.ranks if file.rank is not None and file.rank < size]


def forecast_of(run: Run) -> dict[str, Any] | None:
    """What the run was expected to cost, with the fields of a ``Forecast``; None where nobody said anything."""
    told = [event for file in present_ranks(run) if (event := _newest(file)) is not None]
    if not told:
        kept = None if run.forecast is None else read_rehearsal(run.forecast)
        return None if kept is None else _fields(kept)
    found: dict[str, Any] = {name: _first(event.get(name) for event in told) for name in _OF_ALL}
    for name in _BY_RANK:
        parts = [event[name] for event in told if isinstance(event.get(name), dict)]
        found[name] = {rank: part for each in parts for rank, part in each.items()} if parts else None
    return found


def _newest(file: EventFile) -> dict[str, Any] | None:
    """What a rank expected when it began for the last time; None where it said nothing then."""
    told = None
    for event in file.events("run_started", "forecast"):
        told = event if event["kind"] == "forecast" else None
    return told


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _fields(forecast: Forecast) -> dict[str, Any]:
    return {name: getattr(forecast, name) for name in (*_OF_ALL, *_BY_RANK)}
