"""``summary.json`` and ``forecast.json``: compared, told, and made up for a run that died.

No torch: the launcher reads them too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.plan import Plan
from shoal.core.rundir import RunDir, replace_text
from shoal.core.units import format_bytes, format_count, format_duration
from shoal.telemetry.summaryfile import write_summary


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended, for the command line."""

    exit_code: int
    summary: dict[str, Any]
    was_orderly: bool = True
    """False when ranks died: the failure report was printed already, and the summary has little to add."""


def summarise_servers(
    found: dict[str, Any],
    *,
    plan: Plan,
    total_steps: int,
    stopped_by: str | None,
    wall_seconds: float,
    peak_rss_bytes: Sequence[int],
    num_deaths: int | None,
    notices: Mapping[str, Any],
) -> dict[str, Any]:
    """The summary of a run with parameter servers.

    Args:
        found: what its last checkpoint and its events say (``closing.py``).
        plan: the plan that ran.
        total_steps: that it was to take.
        stopped_by: why it was stopped; None when nobody did.
        wall_seconds: since its start.
        peak_rss_bytes: of the processes that could be measured.
        num_deaths: of processes; None where nobody counts.
        notices: what else happened, by name (``serverrun/notices.py``).
    """
    is_done = found["steps"] >= total_steps
    return {
        "status": "completed" if is_done else "interrupted",
        "stopped_by": None if is_done else stopped_by,
        **found,
        "wall_s": wall_seconds,
        "world_size": plan.world_size,
        "plan": str(plan),
        "peak_rss_bytes": list(peak_rss_bytes),
        "deaths": num_deaths,
        **notices,
    }


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


def describe_summary(summary: dict[str, Any], run_dir: Path) -> str:
    """The summary as people read it."""
    lines = [f"{summary['status']} after {summary['steps']} steps in {format_duration(summary['wall_s'])}"]
    if summary["stopped_by"]:
        lines[0] += f", stopped by {summary['stopped_by']}"
    if summary.get("skipped_steps"):
        lines.append(
            f"skipped          {summary['skipped_steps']} of {summary['steps']} steps, not finite or above train.spike"
        )
    if summary.get("rollbacks"):
        lines.append(
            f"rolled back      {_many(summary['rollbacks'], 'time')} to the last good checkpoint, at a lower rate"
        )
    if summary.get("not_finite"):
        lines.append(
            f"refused          {_many(summary['not_finite'], 'gradient')} with NaN or infinity; no weight met them"
        )
    if summary.get("went_back"):
        lines.append(
            f"went back        {_many(summary['went_back'], 'time')} to a checkpoint: no copy of a shard was left"
        )
    if summary.get("hung"):
        lines.append(f"hung             {_many(summary['hung'], 'worker')}, ended and started again")
    if dropped := summary.get("messages_dropped"):
        listed = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        lines.append(f"dropped          {_many(sum(dropped.values()), 'message')}: {listed}")
    if summary["final_loss"] is not None and summary["first_loss"] is not None:
        lines.append(f"loss             {summary['first_loss']:.4f} -> {summary['final_loss']:.4f}")
    if summary["validation_loss"] is not None:
        accuracy = summary.get("validation_accuracy")
        right = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        lines.append(f"validation loss  {summary['validation_loss']:.4f}{right}")
    if summary["baseline_loss"] is not None:
        lines.append(
            f"bigram entropy   {summary['baseline_loss']:.4f}  (below it, a model has learned more than pairs of tokens)"
        )
    if summary.get("island_distance") is not None:
        lines.append(f"islands apart    {summary['island_distance']:.4g}, the root mean square distance to their mean")
    if (sent := summary.get("exchange")) is not None:
        lines.append(f"exchanged        {_describe_exchange(sent)}")
    # Where a sample is no sequence, its one item is nobody's token.
    items = "samples" if summary["tokens_per_s"] == summary.get("samples_per_s") else "tokens"
    lines += [
        f"speed            {format_count(summary[f'{items}_per_s'])} {items}/s, {summary['plan']}",
        f"peak memory      {', '.join(format_bytes(peak) for peak in summary['peak_rss_bytes'])} by rank",
        f"weights          sha256 {summary['weights_sha256'][:16]}...",
        f"run directory    {run_dir}",
        *describe_forecast(summary),
    ]
    return "\n".join(lines)


def _describe_exchange(sent: Mapping[str, Any]) -> str:
    """What replicas or islands sent each other, for people."""
    rounds = "" if sent["rounds"] is None else f" in {_many(sent['rounds'], 'round')}"
    if not sent["bytes"]:
        return f"nothing{rounds}"
    return f"{format_bytes(sent['bytes'])} by all ranks{rounds}, {sent['ratio']:.3g} times less than whole sums at every step"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
