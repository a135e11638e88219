"""The table of runs, and the header of one."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.folder import RunFolder
from shoal.dashboard.runs.pyramid import finite_list
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.checkpoints import checkpoints
from shoal.dashboard.views.forecast import forecast_of
from shoal.dashboard.views.plain import finite, jsonable, text
from shoal.dashboard.views.status import (
    culprit_of,
    eta_seconds,
    kind_of,
    proof_of,
    status_of,
    step_of,
    step_seconds,
    tokens_per_s,
    total_steps,
)

_SPARK_POINTS = 30
_ANSWER_BYTES = 180_000
_RECIPE_TEXT = 60_000


def run_row(run: Run, now: float) -> dict[str, Any]:
    """A run as a row of the table."""
    status = status_of(run, now)
    culprit = culprit_of(run, status)
    summary = run.summary or {}
    lead = run.lead()
    started = min((as_number(event["t"]) for event in run.events("run_started")), default=None)
    plan = run.plan.get("plan", summary.get("plan"))
    return {
        "id": run.id,
        "name": text(run.name, 300),
        "kind": kind_of(run),
        "status": status,
        "plan": text(plan, 500) if isinstance(plan, str) else "",
        "world_size": _world_size(run),
        "step": step_of(run),
        "total_steps": total_steps(run),
        "loss": finite(lead.steps.last("loss")) if lead is not None else finite(summary.get("final_loss")),
        "validation_loss": _validation_loss(run),
        "tokens_per_s": finite(tokens_per_s(run, status)),
        "step_seconds": finite(step_seconds(run)),
        "memory_bytes": _memory_bytes(run),
        "started": finite(started),
        "updated": finite(max(run.newest, run.live_changed_at, run.summary_changed_at) or None),
        "eta_s": finite(eta_seconds(run, status)),
        "culprit": None if culprit is None else jsonable(culprit.as_json()),
        "spark": _spark(run),
        "hash": text(summary["weights_sha256"], 64) if isinstance(summary.get("weights_sha256"), str) else None,
        "proof": proof_of(run),
    }


def _world_size(run: Run) -> int | None:
    found = [event.get("world_size") for event in run.events("run_started")]
    size = found[-1] if found else (run.summary or {}).get("world_size")
    return size if isinstance(size, int) else None


def _validation_loss(run: Run) -> float | int | None:
    tables = [file.tables["evaluated:validation"] for file in run.ranks if "evaluated:validation" in file.tables]
    return finite(tables[0].last("loss")) if tables else finite((run.summary or {}).get("validation_loss"))


def _memory_bytes(run: Run) -> float | int | None:
    """Of the rank that has most of it: now where the run goes on, at its fullest else."""
    ranks = (run.live or {}).get("ranks")
    if isinstance(ranks, list) and (run.live or {}).get("status") == "running":
        sizes = [as_number(one.get("rss_bytes")) for one in ranks if isinstance(one, dict)]
        if any(size > 0 for size in sizes):
            return finite(max(size for size in sizes if size > 0))
    peaks = (run.summary or {}).get("peak_rss_bytes")
    found = [as_number(peak) for peak in peaks] if isinstance(peaks, list) else []
    found += [file.tables["memory"].last("peak_rss_bytes") for file in run.ranks if "memory" in file.tables]
    return finite(max((size for size in found if size > 0), default=None))


def _spark(run: Run) -> list[float | int | None]:
    curve = run.curve("loss")
    if curve is None:
        return []
    _, buckets, _ = curve.window("step", None, None, _SPARK_POINTS)
    return [None if value is None else float(f"{value:.5g}") for value in finite_list(buckets.mean)][:60]


def runs_answer(folder: RunFolder, rows: Mapping[str, dict[str, Any]], now: float, offset: int = 0) -> dict[str, Any]:
    """The table: ``/api/runs``; the runs that moved last first.

    Of many runs it is cut where it would grow too long; ``next`` is the offset to ask for the rest with.
    """
    ordered = sorted(rows.values(), key=lambda row: (row["updated"] or 0.0, row["name"]), reverse=True)
    size, kept = 0, []
    for row in ordered[max(offset, 0) :]:
        size += len(msgspec.json.encode(row)) + 1
        if size > _ANSWER_BYTES:
            break
        kept.append(row)
    end = max(offset, 0) + len(kept)
    skipped = [{"name": text(name, 300), "reason": reason} for name, reason in list(folder.skipped.items())[:50]]
    if folder.trouble:
        skipped.insert(0, {"name": text(folder.path, 300), "reason": text(folder.trouble, 200)})
    for run in folder.runs.values():
        if run.id in folder.strange:
            skipped.append({"name": text(run.name, 300), "reason": text(folder.strange[run.id], 200)})
        if len(skipped) < 200:
            skipped += [
                {"name": text(f"{run.name}/{name}", 300), "reason": text(reason, 200)}
                for name, reason in list(run.skipped.items())[:20]
            ]
    following = end if end < len(ordered) else None
    return {"runs": kept, "skipped": skipped, "now": now, "total": len(ordered), "next": following}


def run_answer(run: Run, now: float) -> dict[str, Any]:
    """The header of a run: ``/api/run/ID``."""
    return {
        **run_row(run, now),
        "plan": jsonable(run.plan),
        "recipe": text(run.recipe, _RECIPE_TEXT),
        "summary": jsonable(run.summary),
        "certificates": [_certificate(one) for one in run.certificates[:20]],
        "generations": generations(run),
        "ranks": rank_places(run),
        "curves": [{"name": text(one.name, 200), "unit": one.unit, "ranks": one.by_rank} for one in run.curve_names()],
        "timeline_steps": timeline_steps(run),
        "logs": logs(run),
        "checkpoints": checkpoints(run),
        "broken_lines": run.broken_lines,
        "long_lines": run.long_lines,
        "unknown_kinds": {text(kind, 100): count for kind, count in list(run.unknown_kinds.items())[:100]},
        "skipped": [
            {"name": text(name, 300), "reason": text(why, 200)} for name, why in list(run.skipped.items())[:100]
        ],
        "forecast": jsonable(forecast_of(run)),
        "live": jsonable(run.live),
    }


def _certificate(values: dict[str, Any]) -> dict[str, Any]:
    plans = [one for one in values["plans"] if isinstance(one, dict)]
    mutants = [one for one in values["mutants"] if isinstance(one, dict)]
    return {
        "file": text(values["file"], 200),
        "ok": values.get("ok") is True,
        "plans": [jsonable(_plan_of_certificate(one)) for one in plans[:50]],
        "mutants": len(mutants),
        "mutants_caught": sum(one.get("caught") is True for one in mutants),
    }


def _plan_of_certificate(one: dict[str, Any]) -> dict[str, Any]:
    keys = ("plan", "ok", "status", "bitwise", "dtype", "steps", "worst", "first_difference")
    return {key: one.get(key) for key in keys if key in one}


def generations(run: Run) -> list[dict[str, Any]]:
    """The starts of the run, from the first: of each its number, when, from which step, and why the one before ended."""
    lead = run.lead() or next(iter(run.ranks), None)
    if lead is None:
        return []
    failed = run.events("rank_failed")
    found = []
    for event in lead.events("run_started"):
        before = [one for one in failed if one.get("generation") == event.get("generation", 0) - 1]
        found.append(
            {
                "generation": finite(event.get("generation")),
                "t": finite(event.get("t")),
                "step": finite(event.get("step")),
                "world_size": finite(event.get("world_size")),
                "plan": text(event.get("plan"), 500),
                "cause": text(before[-1].get("cause"), 500) if before and event.get("generation") else None,
            }
        )
    return found[-200:]


def rank_places(run: Run) -> list[dict[str, Any]]:
    """The ranks, where each is, and which place of the mesh it has, as far as events say."""
    newest: dict[int, dict[str, Any]] = {file.rank: {} for file in run.ranks if file.rank is not None}
    for event in run.events("placed"):
        if isinstance(event["rank"], int):
            newest[event["rank"]] = event
    return [
        {
            "rank": rank,
            "host": text(event.get("host", ""), 200),
            "device": text(event.get("device", ""), 100),
            "coordinates": jsonable(event.get("coordinates") or {}),
        }
        for rank, event in sorted(newest.items())
    ][:1024]


def timeline_steps(run: Run) -> list[int]:
    """The steps of which there are spans; the newest 500."""
    return sorted({place.step for file in run.ranks for place in file.spans})[-500:]


def logs(run: Run) -> list[dict[str, Any]]:
    """The files that ranks and others printed to."""
    names = [name for name in run.names_in("logs") if name.endswith(".log")][:1024]
    return [{"name": name.removesuffix(".log"), "bytes": run.size_of("logs", name)} for name in names]
