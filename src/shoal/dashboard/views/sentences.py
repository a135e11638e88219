"""What each kind of event is in words: a key, the sentence of that key, and how the values in it are found.

The sentence is English; the key and the values go along, so that a page in another language has sentences of its own.
"""

from collections.abc import Callable
from typing import Any

from shoal.core.units import format_bytes, format_duration
from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.views.plain import text

Level = str
Values = dict[str, str]

SENTENCES: dict[str, tuple[Level, str]] = {
    "run_started": ("info", "Training began with {world_size} ranks under the plan {plan}."),
    "run_resumed": ("info", "Training went on from step {step} with {world_size} ranks (start number {generation})."),
    "run_ended": ("info", "Training ended at step {step} after {seconds}: {status}."),
    "run_cut_short": ("warning", "Training ended at step {step} after {seconds}: {status}."),
    "evaluated": ("info", "Step {step}: loss {loss} on {samples} samples of the {split} split."),
    "checkpoint_saved": (
        "info",
        "The checkpoint of step {step} was saved: {size}, written in {write}, {stall} of standing still.",
    ),
    "checkpoint_failed": (
        "error",
        "The checkpoint of step {step} could not be saved: {reason}. Older ones are untouched.",
    ),
    "checkpoint_refused": ("warning", "The checkpoint {path} is not whole and was passed over: {reason}."),
    "rank_failed": (
        "error",
        "Rank {culprit_rank}{host} failed at step {step} in phase {phase}: {cause}. The run ended.",
    ),
    "rank_failed_restarting": (
        "error",
        "Rank {culprit_rank}{host} failed at step {step} in phase {phase}: {cause}. All ranks are started again.",
    ),
    "hung": ("error", "{worker} did not come out of a work unit of step {step} within {seconds} and ended itself."),
    "non_finite": ("error", "Step {step}: {what} of rank {culprit_rank} was NaN or infinite; what was done: {action}."),
    "skipped": ("warning", "{count} steps were left out, the last of them step {step}."),
    "loss_spiked": ("warning", "Step {step} was left out: its loss {loss} is above {limit}."),
    "rolled_back": (
        "warning",
        "At step {step} the run went back to step {to_step}; the rate is multiplied by {rate_factor}.",
    ),
    "went_back": (
        "warning",
        "After {died} had died, no copy of a shard was left: the servers went back to step {step}.",
    ),
    "view": ("info", "Epoch {epoch}: {replicas} of {logical} replicas take part ({cause})."),
    "view_of_servers": ("info", "Epoch {epoch}: {members} take part ({cause})."),
    "resumed": ("info", "Step {step} goes on under epoch {epoch}, {seconds} later, with the state of: {source}."),
    "straggler": ("warning", "{member}{host} is busy {factor} times as long as the others, for: {reason}."),
    "straggler_left_out": (
        "warning",
        "{member}{host} is left out: busy {factor} times as long as the others ({reason}).",
    ),
    "reader_slow": (
        "warning",
        "Rank {slow_rank} holds the others up by loading: {load} where the others take {usual}.",
    ),
    "gradient_refused": ("warning", "A gradient of {worker} was not taken: {reason}."),
    "messages_dropped": ("warning", "{process} has dropped messages: {counts}."),
    "published": ("info", "Version {version} was published at step {step}, with loss {loss} on the held-back window."),
    "refresh_refused": ("warning", "Step {step}: the model was not published: {reason}."),
    "epoch_receipt": ("info", "Epoch {epoch} is over: every sample was trained on once ({rows})."),
    "epoch_receipt_open": ("info", "Epoch {epoch} is over ({rows} samples); it could not be proved: {reason}."),
    "epoch_receipt_wrong": (
        "error",
        "Epoch {epoch} did not train on every sample once: {rows} rows instead of {expected}.",
    ),
    "data_grew": ("info", "Version {version} of the data was taken up: {added} samples more."),
    "round_left_out": (
        "warning",
        "Round {round} at step {step}: the part of {islands} was not finite and was left out.",
    ),
    "forecast": ("info", "A step was expected to take {seconds}."),
    "traffic": ("info", "{rank} has sent {pushed} of gradients and got {pulled} of weights."),
    "warning": ("warning", "{message}"),
    "log": ("info", "Step {step}: {values}."),
    "unknown": ("info", "An event of the kind {kind}, which this version does not know."),
    "culprit": ("error", "{who}{host} {where}: {cause}"),
    "culprit_hangs": ("error", "{who}{host} does not answer{where}: {cause}"),
    "report": ("error", "What rank {rank} said of it: {type}: {message}"),
    "report_of_victim": ("warning", "Rank {rank} lost its connection to another: {type}: {message}"),
    "advice": ("info", "Try: {command}"),
    "certificate": ("info", "Proof {file}: {plans} of {count} plans equal one process."),
    "certificate_failed": ("error", "Proof {file} failed: {plans} of {count} plans equal one process."),
    "broken_lines": ("warning", "{count} lines of event files are no events and were passed over."),
    "long_lines": ("warning", "{count} lines of event files are longer than any event and were passed over."),
    "file_skipped": ("warning", "{name} was not read: {reason}."),
}


def sentence(key: str, values: Values) -> str:
    """The sentence of a key with its values."""
    return SENTENCES[key][1].format_map(_Known(values))


class _Known(dict[str, str]):
    """What an older or broken event lacks is shown as a question mark."""

    def __missing__(self, key: str) -> str:
        return "?"


def _number(value: object) -> str:
    found = as_number(value)
    return f"{found:.6g}" if isinstance(value, int | float) or found == found else text(value, 40)


def _plain(*names: str) -> Callable[[dict[str, Any]], Values]:
    return lambda event: {name: text(event.get(name), 500) for name in names}


def _seconds(value: object) -> str:
    found = as_number(value)
    if not 0 <= found < 1e9:
        return "?"
    return format_duration(found) if found >= 1 else f"{found * 1000:.3g} ms"


def _bytes(value: object) -> str:
    found = as_number(value)
    return format_bytes(int(found)) if 0 <= found < 2**63 else "?"


def _host(event: dict[str, Any]) -> str:
    return f" on {text(event['host'], 100)}" if event.get("host") else ""


def _started(event: dict[str, Any]) -> tuple[str, Values]:
    again = bool(event.get("generation") or event.get("step"))
    names = ("step", "world_size", "generation", "plan")
    return ("run_resumed" if again else "run_started"), _plain(*names)(event)


def _receipt(event: dict[str, Any]) -> tuple[str, Values]:
    ok = event.get("ok")
    key = "epoch_receipt" if ok is True else "epoch_receipt_wrong" if ok is False else "epoch_receipt_open"
    values = _plain("epoch", "rows", "reason")(event)
    return key, {**values, "expected": text(event.get("expected_rows"), 40)}


def _failed(event: dict[str, Any]) -> tuple[str, Values]:
    key = "rank_failed_restarting" if event.get("restarting") is True else "rank_failed"
    values = _plain("culprit_rank", "step", "phase", "cause")(event)
    return key, {
        **values,
        "phase": values["phase"] or "start",
        "cause": values["cause"].rstrip("."),
        "host": _host(event),
    }


def _view(event: dict[str, Any]) -> tuple[str, Values]:
    members = event.get("members")
    shown = ", ".join(text(member, 40) for member in members[:12]) if isinstance(members, list) else ""
    values = {**_plain("epoch", "replicas", "logical", "cause")(event), "members": shown}
    has_replicas = isinstance(event.get("logical"), int) and event["logical"] > 0
    return ("view" if has_replicas else "view_of_servers"), values


def _round(event: dict[str, Any]) -> tuple[str, Values] | None:
    left_out = event.get("left_out")
    if not isinstance(left_out, list) or not left_out:
        return None
    islands = f"island {', '.join(text(island, 10) for island in left_out[:20])}"
    return "round_left_out", {**_plain("round", "step")(event), "islands": islands}


def _log(event: dict[str, Any]) -> tuple[str, Values] | None:
    values = event.get("values")
    if not isinstance(values, dict):
        return None
    shown = ", ".join(f"{text(name, 40)} {_number(value)}" for name, value in list(values.items())[:8])
    return "log", {"step": text(event.get("step"), 20), "values": shown}


def _straggler(event: dict[str, Any]) -> tuple[str, Values]:
    key = "straggler_left_out" if event.get("is_left_out") is True else "straggler"
    values = _plain("member", "reason")(event)
    return key, {**values, "host": _host(event), "factor": f"{as_number(event.get('factor')):.2f}"}


def _named(key: str, find: Callable[[dict[str, Any]], Values]) -> Callable[[dict[str, Any]], tuple[str, Values]]:
    return lambda event: (key, find(event))


def _counts(event: dict[str, Any]) -> Values:
    counts = event.get("counts")
    pairs = list(counts.items())[:10] if isinstance(counts, dict) else []
    shown = ", ".join(f"{text(count, 20)} {text(name, 60)}" for name, count in pairs)
    return {"process": text(event.get("process"), 100), "counts": shown}


def _died(event: dict[str, Any]) -> Values:
    died = event.get("died")
    return {
        "step": text(event.get("step"), 20),
        "died": ", ".join(map(text, died[:10])) if isinstance(died, list) else "?",
    }


FINDERS: dict[str, Callable[[dict[str, Any]], tuple[str, Values] | None]] = {
    "run_started": _started,
    "run_ended": lambda event: (
        "run_ended" if event.get("status") == "completed" else "run_cut_short",
        {**_plain("step", "status")(event), "seconds": _seconds(event.get("seconds"))},
    ),
    "evaluated": _named(
        "evaluated", lambda event: {**_plain("step", "samples", "split")(event), "loss": _number(event.get("loss"))}
    ),
    "checkpoint_saved": _named(
        "checkpoint_saved",
        lambda event: {
            "step": text(event.get("step"), 20),
            "size": _bytes(event.get("num_bytes")),
            "write": _seconds(event.get("write_seconds")),
            "stall": _seconds(event.get("stall_seconds")),
        },
    ),
    "checkpoint_failed": _named("checkpoint_failed", _plain("step", "reason")),
    "checkpoint_refused": _named("checkpoint_refused", _plain("path", "reason")),
    "rank_failed": _failed,
    "hung": _named(
        "hung", lambda event: {**_plain("worker", "step")(event), "seconds": _seconds(event.get("seconds"))}
    ),
    "non_finite": _named("non_finite", _plain("step", "what", "culprit_rank", "action")),
    "loss_spiked": _named(
        "loss_spiked",
        lambda event: {
            "step": text(event.get("step"), 20),
            "loss": _number(event.get("loss")),
            "limit": _number(event.get("limit")),
        },
    ),
    "rolled_back": _named(
        "rolled_back",
        lambda event: {**_plain("step", "to_step")(event), "rate_factor": _number(event.get("rate_factor"))},
    ),
    "went_back": _named("went_back", _died),
    "view": _view,
    "resumed": _named(
        "resumed", lambda event: {**_plain("step", "epoch", "source")(event), "seconds": _seconds(event.get("seconds"))}
    ),
    "straggler": _straggler,
    "reader_slow": _named(
        "reader_slow",
        lambda event: {
            "slow_rank": text(event.get("slow_rank"), 20),
            "load": _seconds(event.get("load_seconds")),
            "usual": _seconds(event.get("usual_seconds")),
        },
    ),
    "gradient_refused": _named("gradient_refused", _plain("worker", "reason")),
    "messages_dropped": _named("messages_dropped", _counts),
    "published": _named(
        "published", lambda event: {**_plain("version", "step")(event), "loss": _number(event.get("loss"))}
    ),
    "refresh_refused": _named("refresh_refused", _plain("step", "reason")),
    "epoch_receipt": _receipt,
    "data_grew": _named("data_grew", _plain("version", "added")),
    "round": _round,
    "forecast": lambda event: (
        ("forecast", {"seconds": _seconds(event["step_seconds"])}) if event.get("step_seconds") is not None else None
    ),
    "traffic": _named(
        "traffic",
        lambda event: {
            "rank": text(event.get("source"), 40),
            "pushed": _bytes(event.get("pushed_bytes")),
            "pulled": _bytes(event.get("pulled_bytes")),
        },
    ),
    "warning": _named("warning", _plain("message")),
    "log": _log,
}
"""By the kind of an event: its key and values; None for one that nobody has to read."""

SILENT = frozenset(
    {
        "step",
        "work",
        "queues",
        "exchange",
        "spans",
        "memory",
        "update",
        "data_cache",
        "axis_traffic",
        "placed",
        "drift",
        "adapted",
        "islands",
    }
)
"""Kinds that are numbers, which other views show."""
