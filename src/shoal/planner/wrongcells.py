"""Which cells of a table are wrong, as opposed to not known.

What is not known is assumed, and the row is predicted. A cell that names something there is not (``zero`` 9, ``bf17``) would be
assumed away as well, and its row be predicted for another run than the table means. The line between the two: a phrase, or a word
by which people say that they do not know, explains; a single word or number in the place of a value is meant as one.
"""

import math
import re
from collections.abc import Iterator, Mapping

from shoal.core.errors import nearest
from shoal.core.pipelines import SCHEDULES
from shoal.planner.cells import is_schedule, read_precision, read_recompute, read_zero

_UNSAID = (
    "?", "??", "-", "--", "n/a", "n.a.", "na", "nan", "nil", "null", "none", "unknown", "unstated", "unspecified", "unreported",
    "undisclosed", "unclear", "assumed", "default", "auto", "tbd", "varies", "various", "mixed", "partial", "custom",
)  # fmt: skip
_COUNTS = ("heads", "kv_heads", "ffn_hidden", "vocab", "micro_batch", "params_b")
"""Columns of numbers that may be unknown; ``table.py`` asks for the others."""
_TYPE = re.compile(r"(?<![a-z0-9])(?:bf|fp|tf|bfloat|float|mxfp|nvfp|u?int)\d+(?![a-z0-9])", re.IGNORECASE)
_SWITCH = ("0", "1", "no", "yes", "off", "on", "false", "true")
_TYPES = ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32")
_RECOMPUTE = ("none", "selective", "full", "unknown")
_NO_SHARDS = ("no", "off", "false", "ddp", "dp")


def is_unsaid(text: str) -> bool:
    """Whether a cell says that something is not known: blank, a word for it, or a phrase that explains."""
    words = text.lower().split()
    return len(words) != 1 or words[0].strip("()~") in _UNSAID


def wrong_cells(row: Mapping[str, str]) -> Iterator[str]:
    """What is wrong, one sentence each: the column, its value and what it may be."""
    for column in _COUNTS:
        text = row.get(column, "")
        if _number(text) is None and not is_unsaid(text):
            yield f"{column} is {text.strip()!r}, and a number is needed, or blank where it is not known"
    yield from _wrong_zero(row["zero"])
    precision = row["precision"]
    if read_precision(precision) is None and (_TYPE.search(precision) or not is_unsaid(precision)):
        yield _choose("precision", precision, _TYPES)
    if read_recompute(row["recompute"]) == "unknown" and not is_unsaid(row["recompute"]):
        yield _choose("recompute", row["recompute"], _RECOMPUTE)
    switch = row["seq_parallel"].strip().lower().removesuffix(".0")
    if switch not in _SWITCH and not is_unsaid(switch):
        yield _choose("seq_parallel", row["seq_parallel"], ("0", "1"))
    schedule = row["schedule_or_interleave"]
    has_stages = (_number(row["pp"]) or 1) > 1
    if has_stages and not is_schedule(schedule) and not is_unsaid(schedule):
        yield _choose("schedule_or_interleave", schedule, tuple(SCHEDULES))


def _wrong_zero(text: str) -> Iterator[str]:
    found = re.match(r"\s*(-?\d+(?:\.\d+)?)", text) or re.search(r"zero[\s-]*(\d+)", text, re.IGNORECASE)
    is_stage = found is not None and float(found[1]) in (0, 1, 2, 3)
    is_word = read_zero(text) is not None or text.strip().lower() in _NO_SHARDS or is_unsaid(text)
    if not is_stage and (found is not None or not is_word):
        yield _choose("zero", text, ("0", "1", "2", "3"))


def _choose(column: str, text: str, allowed: tuple[str, ...]) -> str:
    close = nearest(text.strip().lower(), allowed)
    offer = f"did you mean {close!r}? " if close else ""
    return f"{column} is {text.strip()!r}; {offer}it may be {', '.join(allowed)}, or blank where it is not known"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isinf(value) else value
