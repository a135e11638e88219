"""``shoal runs compare``: what differs between two runs, and the first step at which they part."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.dashboard.opening import open_run
from shoal.dashboard.terminal.drawing import plain
from shoal.dashboard.views.compare import compare_answer

_WIDE = 60
_RESULTS = ("status", "step", "loss", "validation_loss", "tokens_per_s", "step_seconds", "memory_bytes", "hash")


def compare(first: Path, second: Path) -> dict[str, Any]:
    """The differences of two runs.

    Raises:
        RequestError: one of them is no run, or both are the same.
    """
    runs = [open_run(first), open_run(second)]
    if runs[0].path == runs[1].path:
        raise RequestError(f"{first} and {second} are the same run; name two")
    return {"runs": [str(first), str(second)], **compare_answer(runs, time.time())}


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """The differences as lines, the most telling first."""
    first, second = found["runs"]
    yield f"A  {plain(first)}"
    yield f"B  {plain(second)}"
    difference = found["first_difference"]
    yield ""
    if difference is None:
        yield f"no difference in the {found['common_steps']} steps that both have"
    else:
        values = " and ".join(_show(value) for value in difference["values"])
        yield f"first difference: {plain(str(difference['what']))} of step {difference['step']}: {values}"
    results = [{"key": key, "values": [one[key] for one in found["summary"]]} for key in _RESULTS]
    for section, given in (("plan", found["plan"]), ("recipe", found["recipe"]), ("results", results)):
        rows = [row for row in given if not _is_alike(row["values"])]
        if rows:
            yield ""
            yield f"{section}:"
            width = max(len(plain(str(row["key"]))) for row in rows)
            for row in rows:
                values = "  |  ".join(_show(value) for value in row["values"])
                yield f"  {plain(str(row['key'])):<{width}}  {values}"


def _is_alike(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _show(value: Any) -> str:
    if value is None:
        return "-"
    text = plain(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."
