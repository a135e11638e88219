"""What a rank says of its own failure, as a small file that outlives it.

An exit code cannot carry a traceback, and a line among the output of many ranks gets lost. The rank writes its report before it
exits; the supervisor reads it afterwards and decides whose failure came first.
"""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shoal.core.errors import FinalError, RequestError
from shoal.core.rundir import RunDir

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """One rank's last words."""

    rank: int
    step: int
    phase: str
    type: str
    """Name of the exception, with its module unless it is Python's own."""
    message: str
    traceback: str
    peer_failure: bool
    """True when the exception only says that another rank is gone: a reset connection, an expired collective."""
    time: float
    """Wall-clock seconds at which it was raised."""
    exit: str
    """``request`` when the request was wrong, ``final`` when the run would fail again in the same way, ``run`` otherwise."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, step: int, phase: str, peer_failure: bool) -> "ErrorReport":
        """The report of an exception that is being handled now."""
        kind = type(error)
        return cls(
            rank=rank,
            step=step,
            phase=phase,
            type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            peer_failure=peer_failure,
            time=time.time(),
            exit="request" if isinstance(error, RequestError) else "final" if isinstance(error, FinalError) else "run",
        )


def write_report(run_dir: Path, report: ErrorReport) -> None:
    """Leave the report where the supervisor looks for it.

    Raises:
        OSError: the disk would not take it; print the traceback instead.
    """
    path = RunDir(run_dir).error(report.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed: the supervisor may look at any moment, and must never read half a report.
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(asdict(report)), encoding="utf-8")
    beside.replace(path)


def read_report(run_dir: Path, rank: int) -> ErrorReport | None:
    """The report a rank left, or None when there is none that can be read."""
    try:
        with RunDir(run_dir).error(rank).open("rb") as file:
            values = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None
    return _from_values(values, rank) if isinstance(values, dict) else None


def clear_reports(run_dir: Path, ranks: Sequence[int] | None = None) -> None:
    """Remove the reports of an earlier generation, so that nobody is blamed for what happened before.

    Args:
        run_dir: the run directory.
        ranks: whose reports; left out, those of all.
    """
    run = RunDir(run_dir)
    for path in run.errors.glob("rank-*") if ranks is None else map(run.error, ranks):
        path.unlink(missing_ok=True)


def _from_values(values: dict[str, Any], rank: int) -> ErrorReport | None:
    wanted = {"int": int, "str": str, "bool": bool, "float": (int, float)}
    kinds = {field.name: wanted[getattr(field.type, "__name__", str(field.type))] for field in fields(ErrorReport)}
    if any(not isinstance(values.get(name), kind) for name, kind in kinds.items()):  # type: ignore[arg-type]
        return None
    return ErrorReport(**{**{name: values[name] for name in kinds}, "rank": rank})
