"""What happened, in sentences: the culprit first where there is one, then everything in the order of time."""

import shlex
from typing import Any

import numpy as np

from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.plain import finite, text
from shoal.dashboard.views.sentences import FINDERS, SENTENCES, SILENT, Values, sentence
from shoal.dashboard.views.status import culprit_of, status_of
from shoal.telemetry.eventlog import KNOWN_KINDS

_SAME_SECONDS = 60.0
_TOGETHER = frozenset(
    {"run_started", "run_ended", "checkpoint_saved", "evaluated", "round", "view", "resumed", "published"}
)
"""Kinds that all ranks say of what they do together, each with times of its own."""
_WHICH = ("step", "epoch", "split", "generation", "round", "version")
"""What tells two such things apart."""
_PAGE = 400
_LEVELS = ("info", "warning", "error")
_MOST_TEXT = 1500
_ANSWER_TEXT = 120_000


def _item(key: str, values: Values, *, t: float | None, rank: object, kind: str, step: object) -> dict[str, Any]:
    return {
        "t": finite(t),
        "rank": rank if isinstance(rank, int) else None,
        "kind": text(kind, 60),
        "level": SENTENCES[key][0],
        "text": text(sentence(key, values), _MOST_TEXT),
        "step": finite(step),
        "words": [key, values],
    }


def story_items(run: Run, now: float) -> list[dict[str, Any]]:
    """All that happened: who is to blame and what was said of it, and then the events, oldest first."""
    events = []
    chorus = _Repeats()
    for event in run.events():
        item = _of_event(event)
        if item is None:
            continue
        # What all ranks say is said once: of things that they do together by which it is, of others where the words are the same.
        is_together = item["kind"] in _TOGETHER
        key = tuple(text(event.get(name), 100) for name in _WHICH) if is_together else (item["text"],)
        if chorus.is_new((item["kind"], *key), event["source"], float(event["t"])):
            events.append(item)
    return [*_head(run, now), *events, *_about_files(run)]


class _Repeats:
    """Tells what several say of one thing from what happened again: one source says a thing once."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, ...], list[float]] = {}
        """When each thing was said first, as often as it happened."""
        self._heard: dict[tuple[tuple[str, ...], str], int] = {}
        """How many of these a source has said, or is too late for."""

    def is_new(self, key: tuple[str, ...], source: str, t: float) -> bool:
        """True where nobody else has said it within a minute. Events come by their times."""
        times = self._times.setdefault(key, [])
        place = self._heard.get((key, source), 0)
        while place < len(times) and t - times[place] >= _SAME_SECONDS:
            place += 1
        is_new = place == len(times)
        if is_new:
            times.append(t)
        self._heard[key, source] = place + 1
        return is_new


def _of_event(event: dict[str, Any]) -> dict[str, Any] | None:
    kind = event["kind"]
    if kind in SILENT:
        return None
    if kind in FINDERS:
        found = FINDERS[kind](event)
        if found is None:
            return None
        key, values = found
    elif kind in KNOWN_KINDS:
        return None
    else:
        key, values = "unknown", {"kind": text(kind, 60)}
    return _item(key, values, t=as_number(event["t"]), rank=event["rank"], kind=kind, step=event.get("step"))


def _head(run: Run, now: float) -> list[dict[str, Any]]:
    """The culprit, what failed ranks said, what to try, steps that were left out, and proofs."""
    status = status_of(run, now)
    culprit = culprit_of(run, status)
    found: list[dict[str, Any]] = []
    if culprit is not None:
        key = "culprit" if status == "failed" else "culprit_hangs"
        who = culprit.rank if isinstance(culprit.rank, str) else f"Rank {culprit.rank}"
        where = f" in phase {text(culprit.phase, 60)}" if culprit.phase else ""
        values = {
            "who": text(who, 60) if culprit.rank is not None else "The run",
            "host": f" on {text(culprit.host, 100)}" if culprit.host else "",
            "where": f"failed{where}" if status == "failed" else where,
            "cause": text(culprit.cause, 1000),
        }
        found.append(_item(key, values, t=run.newest or None, rank=culprit.rank, kind="culprit", step=None))
        found += _reports(run)
        if run.recipe and status == "failed":
            command = (
                f"shoal train {shlex.quote(str(run.directory.recipe))} --run-dir {shlex.quote(str(run.path))} --resume"
            )
            found.append(_item("advice", {"command": text(command)}, t=None, rank=None, kind="advice", step=None))
    found += _skipped_steps(run)
    for one in run.certificates:
        plans = [plan for plan in one["plans"] if isinstance(plan, dict)]
        values = {
            "file": text(one["file"], 100), "plans": str(sum(plan.get("ok") is True for plan in plans)), "count": str(len(plans))
        }  # fmt: skip
        key = "certificate" if one.get("ok") is True else "certificate_failed"
        found.append(_item(key, values, t=None, rank=None, kind="certificate", step=None))
    return found


def _reports(run: Run) -> list[dict[str, Any]]:
    """The culprit's words before those of ranks that only lost it."""
    ordered = sorted(run.errors.values(), key=lambda one: (one.get("peer_failure") is True, as_number(one.get("time"))))
    found: list[dict[str, Any]] = []
    for report in ordered[:20]:
        values = {name: text(report.get(name), 1000) for name in ("rank", "type", "message")}
        key = "report_of_victim" if report.get("peer_failure") is True else "report"
        item = _item(
            key,
            values,
            t=as_number(report.get("time")),
            rank=report.get("rank"),
            kind="report",
            step=report.get("step"),
        )
        found.append({**item, "traceback": text(report.get("traceback"), 8000)} if not found else item)
    return found


def _skipped_steps(run: Run) -> list[dict[str, Any]]:
    lead = run.lead()
    if lead is None:
        return []
    left_out = np.flatnonzero(lead.steps.column("skipped"))
    if not len(left_out):
        return []
    last = int(lead.steps.column("step")[left_out[-1]])
    values = {"count": str(len(left_out)), "step": str(last)}
    at = float(lead.steps.column("t")[left_out[-1]])
    return [_item("skipped", values, t=at, rank=lead.rank, kind="skipped", step=last)]


def _about_files(run: Run) -> list[dict[str, Any]]:
    found = []
    for key, count in (("broken_lines", run.broken_lines), ("long_lines", run.long_lines)):
        if count:
            found.append(_item(key, {"count": str(count)}, t=None, rank=None, kind=key, step=None))
    for name, reason in list(run.skipped.items())[:50]:
        values = {"name": text(name, 200), "reason": text(reason, 200)}
        found.append(_item("file_skipped", values, t=None, rank=None, kind="file_skipped", step=None))
    return found


def story_answer(
    run: Run, now: float, *, level: str = "info", search: str = "", after: int = 0, kind: str = ""
) -> dict[str, Any]:
    """A page of the story: ``/api/run/ID/story``.

    Args:
        run: whose.
        now: the time.
        level: the least that counts: info, warning or error.
        search: only items with this text, whatever its case.
        after: how many items come before the page.
        kind: only items of this kind.
    """
    least = _LEVELS.index(level) if level in _LEVELS else 0
    wanted = search.lower()
    items = [
        item
        for item in story_items(run, now)
        if _LEVELS.index(item["level"]) >= least and wanted in item["text"].lower() and kind in ("", item["kind"])
    ]
    page: list[dict[str, Any]] = []
    size = 0
    for item in items[max(after, 0) :]:
        size += 2 * len(item["text"]) + len(item.get("traceback", "")) + 200
        if len(page) >= _PAGE or (page and size > _ANSWER_TEXT):
            break
        page.append(item)
    end = max(after, 0) + len(page)
    return {"items": page, "next": end if end < len(items) else None, "total": len(items)}
