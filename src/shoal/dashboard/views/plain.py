"""What the answers have in common: numbers that are finite or null, texts of bounded length, lists of bounded size."""

import math
import re
from typing import Any

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST_TEXT = 2000
_MOST_ITEMS = 1000


def finite(value: object) -> float | int | None:
    """A number that JSON takes; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) <= 2**53 else None
    return value if math.isfinite(value) else None


def text(value: object, most: int = _MOST_TEXT) -> str:
    """A text to be shown: without escape codes and control characters, and no longer than ``most``."""
    plain = strip_escapes(str(value)[: 4 * most])
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def strip_escapes(value: str) -> str:
    """A text without what would steer a terminal, or turn the direction of a line; line ends and tabs stay."""
    return _CONTROLS.sub("", _ESCAPES.sub("", value.replace("\r\n", "\n")))


def jsonable(value: Any, depth: int = 6) -> Any:
    """A value of a stranger's file as an answer may hold it: no number that is not finite, no text or list without an end."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return finite(value)
    if isinstance(value, dict) and depth:
        return {text(key, 200): jsonable(item, depth - 1) for key, item in list(value.items())[:_MOST_ITEMS]}
    if isinstance(value, list | tuple) and depth:
        return [jsonable(item, depth - 1) for item in value[:_MOST_ITEMS]]
    return text(value)
