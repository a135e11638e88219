"""Events as lines of a file: how one is written as JSON and read again, and how a file that a kill left torn is continued."""

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, BinaryIO

from shoal.core.events import Event

_KINDS = {known.kind: known for known in Event.__subclasses__()}
_NOT_FINITE = (None, "nan", "inf", "-inf")
"""What a number may be in a file that has no such numbers; older files have null."""


def encode_event(event: Event, *, rank: int | None, wall_time: float) -> bytes:
    """One line, with its newline. ``rank`` is None for what the supervisor says.

    NaN and infinity are no JSON: they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, and ``float()`` reads them.
    """
    fields = {"t": round(wall_time, 6), "rank": rank, **event.as_dict()}
    try:
        text = json.dumps(fields, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(fields), allow_nan=False, default=str)
    return text.encode() + b"\n"


def decode_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The events in lines of a file, without those that a kill or a full disk has torn, and without what is no event."""
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and _is_event(event):
            yield event


def _is_event(event: dict[str, Any]) -> bool:
    """False for an event of a kind that is known whose time or fields are missing, or are no numbers where numbers belong."""
    known = _KINDS.get(str(event.get("kind")))
    if not _is_number(event.get("t")):
        return False
    return known is None or all(_has_field(event, field) for field in fields(known))


def _has_field(event: dict[str, Any], field: Field[Any]) -> bool:
    if field.name not in event:
        return field.default is not MISSING or field.default_factory is not MISSING
    value = event[field.name]
    if field.type is int:
        return type(value) is int
    return field.type is not float or _is_number(value) or value in _NOT_FINITE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def open_lines(path: Path) -> BinaryIO:
    """A file to append lines to, unbuffered; a last line without its newline is ended first.

    Raises:
        OSError: the folder cannot be made or the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)
    try:
        if _is_torn(path):
            file.write(b"\n")
    except OSError:
        file.close()
        raise
    return file


def append_event(path: Path, event: Event, *, rank: int | None) -> bool:
    """Write one event at once, for a process that has few of them; False when the disk would not take it."""
    line = encode_event(event, rank=rank, wall_time=time.time())
    try:
        with open_lines(path) as file:
            return file.write(line) == len(line)
    except OSError:
        return False


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seekable() or file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) not in (b"\n", b"")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
