"""The report card of a run: what ran, how it went, what it cost, as plain values with measured beside forecast.

Every number is one of the events, of the summary or of the forecast; what nobody knows is None and left out where it is shown.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.dashboard.runs.columns import as_number, rows_that_count
from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.forecast import forecast_of

SLOWEST = 5
"""Ranks and steps that are named."""
_SUMMARY = (
    "first_loss",
    "final_loss",
    "validation_loss",
    "validation_accuracy",
    "baseline_loss",
    "skipped_steps",
    "weights_sha256",
    "stopped_by",
)


def build_card(
    run: Run,
    row: Mapping[str, Any],
    ranks: Mapping[str, Any],
    timeline: Mapping[str, Any],
    story: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The card.

    Args:
        run: as it is known.
        row: of the run, by the overview.
        ranks: the view of its ranks.
        timeline: the view of the newest step whose spans were kept.
        story: what happened, in words.
    """
    summary = run.summary or {}
    placed = run.events("placed")
    started = run.events("run_started")
    return {
        "name": row["name"],
        "kind": row["kind"],
        "status": row["status"],
        "culprit": row.get("culprit"),
        "advice": next((item["text"] for item in story if item["kind"] == "advice"), None),
        "plan": row["plan"],
        "world_size": row["world_size"],
        "hosts": sorted({str(event.get("host", "")) for event in placed} - {""}),
        "devices": sorted({str(event.get("device", "")) for event in placed} - {""}),
        "started": row["started"],
        "updated": row["updated"],
        "wall_seconds": _finite(summary.get("wall_s")),
        "steps": row["step"],
        "total_steps": row["total_steps"],
        "result": {"loss": row["loss"], **{name: summary.get(name) for name in _SUMMARY}},
        "speed": _speed(run, row, summary),
        "bubble": timeline.get("bubble"),
        "memory": _memory(ranks),
        "traffic": list(ranks["traffic"]),
        "slowest": _slowest(ranks),
        "restarts": _restarts(run, started),
        "checkpoints": _checkpoints(run),
        "receipts": _receipts(run),
        "proofs": [_proof(certificate) for certificate in run.certificates],
        "skipped_files": run.skipped,
        "broken_lines": run.broken_lines + run.long_lines,
    }


def _speed(run: Run, row: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    lead = run.lead()
    predicted = _finite((forecast_of(run) or {}).get("step_seconds"))
    steps = {} if lead is None else _step_times(lead)
    median = steps.get("median_seconds")
    # Where a step takes no time by the forecast, there is nothing to compare with.
    error = median / predicted - 1.0 if predicted and median is not None else None
    return {
        "tokens_per_s": _finite(summary.get("tokens_per_s", row["tokens_per_s"])),
        "samples_per_s": _finite(summary.get("samples_per_s")),
        **steps,
        "predicted_step_seconds": predicted,
        "slower_than_predicted": error,
    }


def _step_times(lead: EventFile) -> dict[str, Any]:
    """Of the steps that count: those that were done again later do not."""
    table = lead.steps
    rows = rows_that_count(table.column("step"))
    steps, seconds = table.column("step"), table.column("seconds")
    if rows is not None:
        steps, seconds = steps[rows], seconds[rows]
    is_known = np.isfinite(seconds)
    steps, seconds = steps[is_known], seconds[is_known]
    if not len(seconds):
        return {}
    order = np.argsort(-seconds, kind="stable")[:SLOWEST]
    return {
        "median_seconds": float(np.median(seconds)),
        "seconds_99": float(np.quantile(seconds, 0.99)),
        "slowest_steps": [{"step": int(steps[at]), "seconds": float(seconds[at])} for at in order],
    }


def _memory(ranks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measured beside predicted, by rank and by what it is for."""
    found = []
    for entry in ranks["memory"]:
        measured, predicted = entry.get("measured") or {}, entry.get("predicted") or {}
        found.append({"rank": entry["rank"], "measured": measured, "predicted": predicted or None})
    return found


def _slowest(ranks: Mapping[str, Any]) -> list[dict[str, Any]]:
    scores = [score for score in ranks["scores"] if score.get("score") is not None]
    return sorted(scores, key=lambda score: -score["score"])[:SLOWEST]


def _restarts(run: Run, started: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    failures = run.events("rank_failed")
    generations = [as_number(event.get("generation")) for event in started]
    return {
        "count": int(max((value for value in generations if math.isfinite(value)), default=0)),
        "failures": [
            {
                "t": event["t"],
                "rank": event.get("culprit_rank"),
                "host": event.get("host") or None,
                "step": event.get("step"),
                "phase": str(event.get("phase", ""))[:200],
                "cause": str(event.get("cause", ""))[:2000],
                "restarting": bool(event.get("restarting")),
            }
            for event in failures[-20:]
        ],
    }


def _checkpoints(run: Run) -> dict[str, Any]:
    # Every rank says that it was saved: one word for each step counts.
    saved = {event.get("step"): event for event in reversed(run.events("checkpoint_saved"))}
    failed, refused = run.events("checkpoint_failed"), run.events("checkpoint_refused")
    newest = max(saved.values(), key=lambda event: float(event["t"]), default=None)
    stalls = [value for event in saved.values() if (value := _finite(event.get("stall_seconds"))) is not None]
    return {
        "saved": len(saved),
        "newest_step": None if newest is None else newest.get("step"),
        "newest_bytes": None if newest is None else newest.get("num_bytes"),
        "stall_seconds": sum(stalls) if stalls else None,
        "failed": len({event.get("step") for event in failed}),
        "refused": [str(event.get("reason", ""))[:500] for event in refused[-5:]],
    }


def _receipts(run: Run) -> list[dict[str, Any]]:
    found = {event.get("epoch"): event for event in run.events("epoch_receipt")}
    return [
        {"epoch": epoch, "rows": event.get("rows"), "ok": event.get("ok"), "reason": str(event.get("reason", ""))[:500]}
        for epoch, event in found.items()
    ]


def _proof(certificate: Mapping[str, Any]) -> dict[str, Any]:
    plans = [one for one in certificate.get("plans") or () if isinstance(one, dict)]
    mutants = [one for one in certificate.get("mutants") or () if isinstance(one, dict)]
    return {
        "file": str(certificate.get("file", ""))[:200],
        "ok": bool(plans) and all(one.get("ok") is True for one in plans),
        "plans": [str(one.get("plan", ""))[:500] for one in plans[:50]],
        "mutants_caught": sum(one.get("caught") is True for one in mutants),
        "mutants": len(mutants),
    }


def _finite(value: object) -> float | None:
    found = as_number(value)
    return found if math.isfinite(found) else None
