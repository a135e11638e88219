"""``summary.json``, how a run ended: written in one piece, read back, and made up for a run that died. No torch."""

import json
import math
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError
from shoal.core.rundir import RunDir, replace_text


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Replace ``summary.json`` in one piece: a reader sees the old one or the new one.

    Raises:
        RunError: the disk refused.
    """
    # JSON has no NaN: a loss that was one is null here, as in every other file that programs read.
    plain = {key: _finite(value) for key, value in summary.items()}
    path = RunDir(run_dir).summary
    try:
        replace_text(path, json.dumps(plain, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror}; is {run_dir} still there, and is the disk full?"
        ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run directory, or None when it has none yet, or something that is none."""
    try:
        found = json.loads(RunDir(run_dir).summary.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    is_one = isinstance(found, dict) and type(found.get("status")) is str and type(found.get("steps")) is int
    return found if is_one else None


def summarise_death(
    *,
    status: str,
    plan: str,
    world_size: int,
    step: int,
    cause: str | None,
    wall_seconds: float,
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """The summary of a run that did not end in an orderly way: what is known, and null for what only the living could say."""
    known = before or {}
    return {
        "status": status,
        "stopped_by": cause,
        "steps": step,
        "first_loss": known.get("first_loss"),
        "final_loss": None,
        "validation_loss": None,
        "validation_accuracy": None,
        "baseline_loss": known.get("baseline_loss"),
        "tokens_per_s": None,
        "samples_per_s": None,
        "wall_s": wall_seconds,
        "world_size": world_size,
        "plan": plan,
        "peak_rss_bytes": [],
        "weights_sha256": None,
        "checkpoint_error": None,
    }
