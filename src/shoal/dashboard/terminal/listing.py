"""``shoal runs``: the runs of a folder as rows, filtered and ordered."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError, did_you_mean
from shoal.core.units import format_bytes, format_count
from shoal.dashboard.opening import open_folder
from shoal.dashboard.terminal.drawing import age, plain, seconds
from shoal.dashboard.views.overview import run_row

COLUMNS = ("run", "status", "plan", "step", "loss", "validation", "tokens/s", "step time", "memory", "age", "hash")
_SORTS: Mapping[str, str] = {
    "run": "name",
    "name": "name",
    "status": "status",
    "plan": "plan",
    "step": "step",
    "loss": "loss",
    "validation": "validation_loss",
    "speed": "tokens_per_s",
    "time": "step_seconds",
    "memory": "memory_bytes",
    "age": "updated",
    "started": "started",
}
"""Words for ``--sort``, and the fields of a row that they are."""


def list_folder(folder: Path) -> dict[str, Any]:
    """The rows of a folder's runs.

    Raises:
        RequestError: there is no such folder.
    """
    found, now = open_folder(folder), time.time()
    skipped = [{"name": name, "reason": reason} for name, reason in found.skipped.items()]
    return {"runs": [run_row(run, now) for run in found.runs.values()], "skipped": skipped, "now": now}


def choose_rows(
    rows: Sequence[Mapping[str, Any]], *, filter_text: str | None, sort: str, top: int | None
) -> list[Mapping[str, Any]]:
    """The rows to show, in their order: what has no value stands last whichever way.

    Raises:
        RequestError: there is no such column.
    """
    word = sort.removeprefix("-")
    if word not in _SORTS:
        raise RequestError(f"--sort {word!r} is no column; {did_you_mean(word, _SORTS)}")
    field = _SORTS[word]
    kept = [row for row in rows if filter_text is None or _matches(row, filter_text)]
    known = [row for row in kept if row.get(field) is not None]
    unknown = [row for row in kept if row.get(field) is None]
    # The newest first where age is asked for, as the youngest.
    is_turned = sort.startswith("-") != (word == "age")
    known.sort(key=lambda row: row[field], reverse=is_turned)
    ordered = [*known, *unknown]
    return ordered if top is None else ordered[:top]


def _matches(row: Mapping[str, Any], text: str) -> bool:
    key, equals, value = text.partition("=")
    if equals and key in row:
        return str(value).lower() in str(row[key]).lower()
    return any(
        text.lower() in str(row.get(field) or "").lower() for field in ("name", "plan", "status", "hash", "kind")
    )


def cells_of(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
    """A row as text."""

    def show(field: str, form: Any) -> str:
        return "" if row.get(field) is None else form(row[field])

    step = show("step", str) + (f"/{row['total_steps']}" if row.get("total_steps") is not None else "")
    return (
        plain(str(row["name"])),
        plain(str(row["status"])),
        plain(show("plan", str)),
        step,
        show("loss", "{:.4f}".format),
        show("validation_loss", "{:.4f}".format),
        show("tokens_per_s", format_count),
        show("step_seconds", seconds),
        show("memory_bytes", format_bytes),
        show("updated", lambda moment: age(now - moment)),
        plain(show("hash", str)[:12]),
    )
