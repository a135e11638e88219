"""A forecast beside its run: kept as ``forecast.json``, compared in ``summary.json``, told at the end. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.rundir import RunDir, replace_text
from shoal.core.units import format_bytes
from shoal.trainer.summary import Ended, write_summary


def keep_forecast(run_dir: Path, page: Mapping[str, Any] | None, *, resume: bool) -> dict[str, Any] | None:
    """Put a forecast beside the run, or find the one that a run which goes on has; None where there is none."""
    path = RunDir(run_dir).forecast
    if page is not None:
        replace_text(path, json.dumps(dict(page), indent=1) + "\n")
        return dict(page)
    if not resume or not path.exists():
        path.unlink(missing_ok=True)
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # A forecast that cannot be read is none; nothing else depends on it.
    return (
        found if isinstance(found, dict) and {"plan", "machine", "seconds", "bubble", "ranks"} <= found.keys() else None
    )


def with_forecast(ended: Ended, page: Mapping[str, Any], run_dir: Path) -> Ended:
    """The end of a run with predicted beside measured, in its summary too; as it was where nothing was measured."""
    measured = (ended.summary.get("forecast") or {}).get("measured")
    if not measured or not measured["num_steps"] > 2:
        return ended
    summary = {**ended.summary, "forecast": compare(page, measured, ended.summary.get("peak_rss_bytes") or [])}
    write_summary(run_dir, summary)
    return replace(ended, summary=summary)


def compare(page: Mapping[str, Any], measured: Mapping[str, Any], peaks: Sequence[int | None]) -> dict[str, Any]:
    """Predicted and measured, number by number."""
    foretold, seen = page["ranks"], measured["ranks"]
    return {
        "plan": page["plan"],
        "machine": page["machine"],
        "step_seconds": _pair(page["seconds"], measured["seconds"]),
        "bubble": _pair(page["bubble"], measured["bubble"]),
        "step_bytes": _pair(sum(map(_moved, foretold)), sum(map(_moved, seen))),
        "traffic_is_equal": [rank["traffic"] for rank in foretold] == [rank["traffic"] for rank in seen],
        "state_is_equal": [rank["state_bytes"] for rank in foretold] == [rank["state_bytes"] for rank in seen],
        "ranks": [
            {
                "state_bytes": _pair(rank["state_bytes"], real["state_bytes"]),
                "traffic": _pair(rank["traffic"], real["traffic"]),
                "peak_bytes": _pair(rank["peak_bytes"], peak),
            }
            for rank, real, peak in zip(foretold, seen, peaks or [None] * len(seen), strict=True)
        ],
    }


def _pair(predicted: Any, measured: Any) -> dict[str, Any]:
    pair = {"predicted": predicted, "measured": measured}
    if isinstance(predicted, int | float) and isinstance(measured, int | float) and measured:
        pair["error"] = predicted / measured - 1
    return pair


def _moved(rank: Mapping[str, Any]) -> int:
    return sum(num_bytes for _, num_bytes in rank["traffic"].values())


def describe_forecast(summary: Mapping[str, Any]) -> list[str]:
    """Predicted beside measured, for people; nothing where there is no comparison."""
    found = summary.get("forecast") or {}
    if "step_seconds" not in found:
        return []
    step, moved, ranks = found["step_seconds"], found["step_bytes"], found["ranks"]
    lines = [
        "forecast         predicted beside measured",
        f"  step           {step['predicted'] * 1e3:.1f} ms predicted, {step['measured'] * 1e3:.1f} ms measured "
        f"({step['error']:+.1%})",
    ]
    bubble = found["bubble"]
    if bubble["predicted"] is not None and bubble["measured"] is not None:
        lines.append(f"  bubble         {bubble['predicted']:.1%} predicted, {bubble['measured']:.1%} measured")
    same = "every call and byte equal" if found["traffic_is_equal"] else "NOT equal: see summary.json"
    lines.append(f"  moved          {format_bytes(moved['predicted'])} a step by all ranks, {same}")
    state = [format_bytes(sum(rank["state_bytes"]["predicted"].values())) for rank in ranks]
    held = "equal to the byte" if found["state_is_equal"] else "NOT equal: see summary.json"
    lines.append(f"  state by rank  {', '.join(state)}, {held}")
    peaks = [rank["peak_bytes"] for rank in ranks if rank["peak_bytes"]["predicted"] and rank["peak_bytes"]["measured"]]
    if peaks:
        lines.append(
            f"  peak by rank   predicted {', '.join(format_bytes(pair['predicted']) for pair in peaks)}; "
            f"measured {', '.join(format_bytes(pair['measured']) for pair in peaks)}"
        )
    return lines
