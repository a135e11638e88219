"""``shoal runs prune``: looks, decides by the pure choice, and removes where that was asked for."""

import os
import time
from pathlib import Path
from typing import Any

from shoal.dashboard.cleanup.choice import Conditions, OldRun, choose
from shoal.dashboard.cleanup.removal import is_locked, remove_run, size_of, why_no_run
from shoal.dashboard.opening import open_folder
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.overview import run_row


def prune(folder: Path, conditions: Conditions, *, really: bool) -> dict[str, Any]:
    """Remove old runs of a folder, or say which these would be.

    Returns:
        For every run its outcome: ``goes`` or ``stays`` where nothing is removed, ``gone``, ``failed`` or ``stays`` otherwise.

    Raises:
        RequestError: there is no such folder, or no condition was given.
    """
    now = time.time()
    # Refused before a long look.
    choose((), conditions, now)
    runs = open_folder(folder)
    paths = {run.name: run.path for run in runs.runs.values()}
    choices = choose([_old_run(run, now) for run in runs.runs.values()], conditions, now)
    rows = []
    for choice in choices:
        path, outcome, reason = paths[choice.run.name], "goes" if choice.goes else "stays", choice.reason
        if choice.goes and (unlike := why_no_run(path)):
            outcome, reason = "stays", unlike
        elif choice.goes and really:
            problem = remove_run(path)
            outcome, reason = ("failed", problem) if problem else ("gone", reason)
        size = choice.run.num_bytes
        rows.append({"run": choice.run.name, "path": str(path), "outcome": outcome, "reason": reason, "bytes": size})
    skipped = [{"name": name, "reason": reason} for name, reason in runs.skipped.items()]
    return {"folder": str(folder), "really": really, "runs": rows, "skipped": skipped}


def _old_run(run: Run, now: float) -> OldRun:
    row = run_row(run, now)
    return OldRun(
        name=run.name,
        status=str(row["status"]),
        is_locked=is_locked(run.path),
        updated=max(run.newest, _changed(run.path)),
        num_bytes=size_of(run.path),
    )


def _changed(path: Path) -> float:
    """When something was last put into a run directory: a clock that was wrong makes no run old."""
    found = 0.0
    for name in ("", "events", "checkpoints", "summary.json", "live.json"):
        try:
            found = max(found, os.lstat(path / name).st_mtime)
        except OSError:
            continue
    return found
