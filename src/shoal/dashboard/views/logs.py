"""A piece of what a rank printed, as plain text."""

from pathlib import Path
from typing import Any

from shoal.dashboard.runs.files import Refused, read_range
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.plain import strip_escapes

PIECE = 64 * 1024
_SEARCHED = 16 << 20
"""In one answer; whoever asks goes on from there."""
_BLOCK = 1 << 20


def log_answer(run: Run, name: str, at: int = -PIECE, search: str = "") -> dict[str, Any] | None:
    """A piece of a log: ``/api/run/ID/log``; None where the run has no log of this name.

    Args:
        run: whose.
        name: as the header lists it.
        at: its first byte; negative: counted from the end.
        search: go on to the first line after it that has this text, whatever its case. Where none has in what one answer
            searches, ``"to"`` says how far that was.
    """
    # Looked up among the names that are there: what was asked for never becomes a path.
    if f"{name}.log" not in run.names_in("logs"):
        return None
    path, size = run.path / "logs" / f"{name}.log", run.size_of("logs", f"{name}.log") or 0
    start = max(size + at, 0) if at < 0 else min(at, size)
    try:
        if search:
            is_found, place = _find(run, path, start, size, search)
            if not is_found:
                return {"text": "", "from": start, "to": place, "size": size, "found": False}
            start = place
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
    # The next line, for a search that goes on after this one.
    following = start + (data.find(b"\n") + 1 or len(data))
    return {**answer, "found": True, "next": following} if search else answer


def _find(run: Run, path: Path, start: int, size: int, search: str) -> tuple[bool, int]:
    """Whether a line has the text, and where it begins; where none has, how far was searched."""
    at, end = start, min(size, start + _SEARCHED)
    while at < end:
        data = read_range(run.root, path, at, _BLOCK)
        if not data:
            return False, size
        # Whole lines, so that no text and no letter lies across two blocks, but in a line that is longer than one.
        whole = len(data) if at + len(data) >= size else data.rfind(b"\n") + 1
        lines = data[: whole or len(data)]
        place = _line_with(lines, search)
        if place is not None:
            return True, at + place
        at += whole or max(len(data) - 4 * len(search), 1)
    return False, min(at, size)


def _line_with(lines: bytes, search: str) -> int | None:
    """Where the first line begins that has a text, whatever its case."""
    if search.isascii():
        place = lines.lower().find(search.lower().encode())
        return None if place < 0 else lines.rfind(b"\n", 0, place) + 1
    # Small letters may have another length than large ones: only the number of the line is the same in both.
    shown = lines.decode(errors="replace").lower()
    place = shown.find(search.lower())
    if place < 0:
        return None
    number, begin = shown.count("\n", 0, place), 0
    for _ in range(number):
        begin = lines.index(b"\n", begin) + 1
    return begin
