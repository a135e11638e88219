"""Which cells of a table are wrong, and which are not understood.

What is not known is assumed, and the row is predicted. A number or a type that there is not (``zero`` 9, ``bf17``) is wrong:
its row would be predicted for another run than the table means, and is not. A word that is not understood (``recompute``
"fulll") may be a name that this version has not learnt: its row is predicted as if it were not known, out of range, and the
word is said. A phrase, or a word by which people say that they do not know, explains, and nothing is said of it.
"""

import math
import re
from collections.abc import Iterator, Mapping

from shoal.core.errors import nearest
from shoal.core.pipelines import SCHEDULES
from shoal.planner.tables.cells import is_schedule, read_precision, read_recompute, read_zero

_UNSAID = (
    "?", "??", "-", "--", "n/a", "n.a.", "na", "nan", "nil", "null", "none", "unknown", "unstated", "unspecified", "unreported",
    "undisclosed", "unclear", "assumed", "default", "auto", "tbd", "varies", "various", "mixed", "partial", "custom",
)  # fmt: skip
_COUNTS = ("heads", "kv_heads", "ffn_hidden", "vocab", "micro_batch", "params_b")
"""Columns of numbers that may be unknown; ``table.py`` asks for the others."""
_TYPE = re.compile(r"(?<![a-z0-9])(?:bf|fp|tf|bfloat|float|mxfp|nvfp|mxint|u?int)\d+(?![a-z0-9])", re.IGNORECASE)
_STAGE = re.compile(r"\s*(-?\d+(?:\.\d+)?)")
_NAMED_STAGE = re.compile(r"zero[\s-]*(\d+)", re.IGNORECASE)
_STAGES = ("0", "1", "2", "3")
_SWITCH = ("0", "1", "no", "yes", "off", "on", "false", "true")
_TYPES = ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32", "fp64")
_OTHER_TYPES = ("fp6", "mxfp6", "int4", "int8", "mxint8")
"""Types that there are, and no preset has a peak for: not understood, and not wrong."""
_RECOMPUTE = ("none", "selective", "full", "unknown")
_YES_OR_NO = {"no": 0.0, "false": 0.0, "yes": 1.0, "true": 1.0}
_NO_SHARDS = ("no", "off", "false", "ddp", "dp")


def is_unsaid(text: str) -> bool:
    """Whether a cell says that something is not known: blank, a word for it, or a phrase that explains."""
    words = text.lower().split()
    return len(words) != 1 or words[0].strip("()~") in _UNSAID


def read_measured(row: Mapping[str, str]) -> float | None:
    """What was measured, as a number; of ``oom`` also in a word. None where the cell has neither."""
    text = (row.get("measured_value") or "").strip()
    if row.get("measured_metric", "").strip() == "oom" and text.lower() in _YES_OR_NO:
        return _YES_OR_NO[text.lower()]
    value = _number(text)
    return None if value is None or math.isnan(value) else value


def wrong_cells(row: Mapping[str, str]) -> Iterator[str]:
    """What there is not, one sentence each: the column, its value and what it may be."""
    stage = _STAGE.match(row["zero"]) or _NAMED_STAGE.search(row["zero"])
    if stage is not None and float(stage[1]) not in (0, 1, 2, 3):
        yield _choose("zero", row["zero"], _STAGES)
    types = [found.lower() for found in _TYPE.findall(row["precision"])]
    if read_precision(row["precision"]) is None and any(found not in _OTHER_TYPES for found in types):
        yield _choose("precision", row["precision"], _TYPES)


def odd_cells(row: Mapping[str, str]) -> Iterator[str]:
    """What is not understood, one sentence each: the column, its value and what it may be."""
    for column in _COUNTS:
        text = row.get(column, "")
        if _number(text) is None and not is_unsaid(text):
            yield f"{column} is {text.strip()!r}, and a number is needed, or blank where it is not known"
    yield from _odd_measured(row)
    zero = row["zero"].strip()
    if read_zero(zero) is None and zero.lower() not in _NO_SHARDS and not is_unsaid(zero):
        yield _choose("zero", zero, _STAGES)
    if read_precision(row["precision"]) is None and not is_unsaid(row["precision"]):
        yield _choose("precision", row["precision"], _TYPES)
    if read_recompute(row["recompute"]) == "unknown" and not is_unsaid(row["recompute"]):
        yield _choose("recompute", row["recompute"], _RECOMPUTE)
    switch = row["seq_parallel"].strip().lower().removesuffix(".0")
    if switch not in _SWITCH and not is_unsaid(switch):
        yield _choose("seq_parallel", row["seq_parallel"], ("0", "1"))
    schedule = row["schedule_or_interleave"]
    has_stages = (_number(row["pp"]) or 1) > 1
    if has_stages and not is_schedule(schedule) and not is_unsaid(schedule):
        yield _choose("schedule_or_interleave", schedule, tuple(SCHEDULES))


def _odd_measured(row: Mapping[str, str]) -> Iterator[str]:
    """A value that its metric cannot have. Said, and predicted all the same: predictions do not ask what was measured."""
    metric, measured = row["measured_metric"].strip(), read_measured(row)
    if metric == "mfu" and measured is not None and measured > 1:
        yield (
            f"measured_value is {row['measured_value'].strip()!r}, and mfu is a share, 1 at most; give {measured / 100:g}, or "
            f"measured_metric mfu_percent"
        )
    if metric == "oom" and measured is not None and measured not in (0, 1):
        yield f"measured_value is {row['measured_value'].strip()!r}, and oom is 0 or 1, no or yes, false or true; give one"


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
