"""A report card in words: names and values, one below the other. The terminal prints them, and the page has them in a table."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.core.units import format_bytes, format_count, format_duration
from shoal.dashboard.terminal.drawing import plain, seconds

NamedText = tuple[str, str]
"""What it is, and what is known of it."""


def card_lines(card: Mapping[str, Any]) -> list[NamedText]:
    """The card, in reading order."""
    found = [*_about(card), *_result(card), *_speed(card), *_cost(card), *_events(card)]
    return [(name, plain(text)) for name, text in found]


def _about(card: Mapping[str, Any]) -> Iterator[NamedText]:
    total = f" of {card['total_steps']}" if card["total_steps"] is not None else ""
    yield (
        "run",
        f"{card['name']}: {card['status']} after {card['steps'] if card['steps'] is not None else 0}{total} steps",
    )
    culprit = card["culprit"]
    if culprit:
        where = f" on {culprit['host']}" if culprit.get("host") else ""
        yield (
            "culprit",
            f"rank {culprit.get('rank')}{where} in {culprit.get('phase') or '?'}: {culprit.get('cause') or '?'}",
        )
    if card["advice"]:
        yield "advice", card["advice"]
    size = card["world_size"]
    yield "plan", f"{card['plan'] or '?'}, {'?' if size is None else size} process{'' if size == 1 else 'es'}"
    if card["hosts"]:
        shown = ", ".join(card["hosts"][:8]) + (f" and {len(card['hosts']) - 8} more" if len(card["hosts"]) > 8 else "")
        yield "hosts", f"{shown} ({', '.join(card['devices'][:4])})" if card["devices"] else shown
    if card["started"]:
        took = f", {format_duration(card['wall_seconds'])}" if card["wall_seconds"] is not None else ""
        yield "started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(card["started"])) + took


def _result(card: Mapping[str, Any]) -> Iterator[NamedText]:
    result = card["result"]
    first, final = result.get("first_loss"), result.get("final_loss")
    if _is_number(first) and _is_number(final):
        yield "loss", f"{first:.4f} -> {final:.4f}"
    elif _is_number(result["loss"]):
        yield "loss", f"{result['loss']:.4f}"
    if _is_number(result.get("validation_loss")):
        accuracy = result.get("validation_accuracy")
        more = f", accuracy {accuracy:.1%}" if _is_number(accuracy) else ""
        yield "validation loss", f"{result['validation_loss']:.4f}{more}"
    if _is_number(result.get("baseline_loss")):
        yield "bigram entropy", f"{result['baseline_loss']:.4f}"
    if result.get("weights_sha256"):
        yield "weights", f"sha256 {str(result['weights_sha256'])[:64]}"


def _speed(card: Mapping[str, Any]) -> Iterator[NamedText]:
    speed = card["speed"]
    if speed["tokens_per_s"] is not None:
        yield "speed", f"{format_count(speed['tokens_per_s'])} tokens/s"
    if speed.get("median_seconds") is not None:
        yield "step", f"{seconds(speed['median_seconds'])} in the middle, 99% within {seconds(speed['seconds_99'])}"
        slow = ", ".join(f"{one['step']} ({seconds(one['seconds'])})" for one in speed["slowest_steps"][:3])
        yield "slowest steps", slow
    if speed["predicted_step_seconds"] is not None:
        error = speed["slower_than_predicted"]
        more = f"; measured {error:+.0%}" if error is not None else ""
        yield "step forecast", f"{seconds(speed['predicted_step_seconds'])}{more}"
    bubble = card["bubble"] or {}
    known = [
        f"{name} {bubble[name]:.1%}" for name in ("measured", "planned", "predicted") if _is_number(bubble.get(name))
    ]
    if known:
        yield "bubble", ", ".join(known)
    # One rank alone is as busy as all of them.
    for one in card["slowest"][:3] if len(card["slowest"]) > 1 else ():
        own = f", against its own best {one['against_own']:.2f}" if _is_number(one.get("against_own")) else ""
        yield "busiest rank", f"{one['rank']}: {one['score']:.2f} times as busy as the others{own}"


def _cost(card: Mapping[str, Any]) -> Iterator[NamedText]:
    for entry in card["memory"][:8]:
        measured, predicted = entry["measured"], entry["predicted"] or {}
        parts = []
        for part, value in measured.items():
            if _is_number(value):
                forecast = f" (forecast {format_bytes(predicted[part])})" if _is_number(predicted.get(part)) else ""
                parts.append(f"{part} {format_bytes(value)}{forecast}")
        if parts:
            yield f"memory, rank {entry['rank']}", ", ".join(parts)
    if len(card["memory"]) > 8:
        yield "memory", f"of {len(card['memory']) - 8} more ranks in --json"
    for row in card["traffic"][:12]:
        forecast = row.get("forecast_bytes")
        more = f" (forecast {format_bytes(forecast)})" if _is_number(forecast) else ""
        yield (
            f"traffic {row['axis']}",
            f"{row['operation']}: {row['calls']:.0f} calls, {format_bytes(row['bytes'])}{more}, {seconds(row['seconds'])}",
        )


def _events(card: Mapping[str, Any]) -> Iterator[NamedText]:
    restarts, checkpoints = card["restarts"], card["checkpoints"]
    if restarts["count"]:
        yield "restarts", str(restarts["count"])
    # The only one is the culprit, who was named already.
    is_told = card["status"] == "failed" and len(restarts["failures"]) == 1
    for failure in () if is_told else restarts["failures"][-3:]:
        host = f" on {failure['host']}" if failure["host"] else ""
        yield (
            "failure",
            f"rank {failure['rank']}{host} at step {failure['step']} in {failure['phase']}: {failure['cause']}",
        )
    if checkpoints["saved"]:
        size = f", {format_bytes(checkpoints['newest_bytes'])}" if _is_number(checkpoints["newest_bytes"]) else ""
        stall = (
            f", stood still for {seconds(checkpoints['stall_seconds'])}"
            if checkpoints["stall_seconds"] is not None
            else ""
        )
        yield "checkpoints", f"{checkpoints['saved']}, the newest of step {checkpoints['newest_step']}{size}{stall}"
    if checkpoints["failed"]:
        yield "checkpoints", f"{checkpoints['failed']} failed"
    for reason in checkpoints["refused"]:
        yield "checkpoint refused", reason
    proved = [receipt for receipt in card["receipts"] if receipt["ok"]]
    for receipt in card["receipts"]:
        if not receipt["ok"]:
            yield (
                "receipt",
                f"epoch {receipt['epoch']}: {'WRONG' if receipt['ok'] is False else 'none'} {receipt['reason']}",
            )
    if proved:
        yield "receipts", f"{len(proved)} epochs had every sample once"
    for proof in card["proofs"]:
        mutants = f", {proof['mutants_caught']} of {proof['mutants']} mutants caught" if proof["mutants"] else ""
        yield (
            "proof",
            f"{'ok' if proof['ok'] else 'FAILED'}: {'; '.join(proof['plans'][:3])}{mutants} ({proof['file']})",
        )
    if card["broken_lines"]:
        yield "skipped", f"{card['broken_lines']} lines of event files that are no events"
    for name, reason in list(card["skipped_files"].items())[:5]:
        yield "skipped", f"{name}: {reason}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
