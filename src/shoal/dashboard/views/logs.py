"""A piece of what a rank printed, as plain text."""

from typing import Any

from shoal.dashboard.runs.files import Refused, read_range
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.plain import strip_escapes

PIECE = 64 * 1024
_SEARCHED = 64 << 20


def log_answer(run: Run, name: str, at: int = -PIECE, search: str = "") -> dict[str, Any] | None:
    """A piece of a log: ``/api/run/ID/log``; None where the run has no log of this name.

    Args:
        run: whose.
        name: as the header lists it.
        at: its first byte; negative: counted from the end.
        search: go on to the first line after it that has this text, whatever its case.
    """
    # Looked up among the names that are there: what was asked for never becomes a path.
    if f"{name}.log" not in run.names_in("logs"):
        return None
    path, size = run.path / "logs" / f"{name}.log", run.size_of("logs", f"{name}.log") or 0
    start = max(size + at, 0) if at < 0 else min(at, size)
    found = None
    try:
        if search:
            found = _find(run, path, start, size, search.lower().encode())
            if found is None:
                return {"text": "", "from": start, "to": start, "size": size, "found": False}
            start = found
        data = read_range(run.root, path, start, PIECE)
    except (Refused, OSError) as error:
        return {"text": "", "from": 0, "to": 0, "size": 0, "error": str(error)[:200]}
    # Whole lines, where there are some, so that nothing begins or ends in the middle of a letter.
    if start and not search and (first := data.find(b"\n") + 1):
        data, start = data[first:], start + first
    if start + len(data) < size and (last := data.rfind(b"\n") + 1):
        data = data[:last]
    answer = {
        "text": strip_escapes(data.decode(errors="replace")),
        "from": start,
        "to": start + len(data),
        "size": size,
    }
    return {**answer, "found": True} if search else answer


def _find(run: Run, path: Any, start: int, size: int, wanted: bytes) -> int | None:
    """Where the first line begins that has the text."""
    at, end = start, min(size, start + _SEARCHED)
    while at < end:
        data = read_range(run.root, path, at, 1 << 20)
        if not data:
            return None
        place = data.lower().find(wanted)
        if place >= 0:
            return at + data.rfind(b"\n", 0, place) + 1
        # A text that lies across two pieces is in the next one.
        at += max(len(data) - len(wanted) + 1, 1) if len(data) == 1 << 20 else len(data)
    return None
