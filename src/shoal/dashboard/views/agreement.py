"""How replicas agree: how late gradients were, who took part when, deaths, rounds of islands, compression, caches of data."""

from typing import Any

import numpy as np

from shoal.dashboard.runs.columns import Table, as_number
from shoal.dashboard.runs.pyramid import finite_list
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.plain import finite, text
from shoal.dashboard.views.presence import began, presence

_MOST_ROWS = 400
_MOST_WORKERS = 256


def agreement_answer(run: Run) -> dict[str, Any]:
    """Everything about agreement: ``/api/run/ID/agreement``; null where a run has nothing of a kind."""
    return {
        "staleness": _staleness(run),
        "views": _views(run),
        "deaths": _deaths(run),
        "rounds": _rounds(run),
        "compression": _compression(run),
        "traffic": _worker_traffic(run),
        "dropped": _dropped(run),
        "cache": _cache(run),
        "queues": _queues(run),
        "exchange": _exchange(run),
        "presence": presence(run),
    }


def _staleness(run: Run) -> dict[str, Any] | None:
    """Of each worker, how many of its gradients were how many updates late."""
    workers: dict[str, dict[int, int]] = {}
    for file in run.ranks:
        for worker, known in file.staleness.items():
            mine = workers.setdefault(worker, {})
            for late, count in known.items():
                mine[late] = mine.get(late, 0) + count
        if workers:
            # Every server writes of the same updates.
            break
    if not workers:
        return None
    most = max(late for counts in workers.values() for late in counts)
    # Columns of equal widths where there are too many numbers of updates for one each.
    width = -(-(most + 1) // 100)
    bins = [[first, min(first + width - 1, most)] for first in range(0, most + 1, width)]
    rows = []
    for worker, counts in sorted(workers.items())[:_MOST_WORKERS]:
        row = [0] * len(bins)
        for late, count in counts.items():
            row[late // width] += count
        total = sum(counts.values())
        mean = sum(late * count for late, count in counts.items()) / total
        rows.append({"worker": text(worker, 60), "counts": row, "gradients": total, "mean": mean, "most": max(counts)})
    return {"bins": bins, "workers": rows, "most": most}


def _views(run: Run) -> list[dict[str, Any]] | None:
    """Who took part from when on; what several processes say alike, once."""
    found: dict[object, dict[str, Any]] = {}
    for event in run.events("view"):
        members = event.get("members")
        found.setdefault(
            finite(event.get("epoch")),
            {
                "t": finite(event.get("t")),
                "epoch": finite(event.get("epoch")),
                "replicas": finite(event.get("replicas")),
                "logical": finite(event.get("logical")),
                "members": [text(member, 60) for member in members[:64]] if isinstance(members, list) else [],
                "cause": text(event.get("cause"), 300),
                "retry": event.get("retry") is True,
            },
        )
    return list(found.values())[-_MOST_ROWS:] or None


def _deaths(run: Run) -> list[dict[str, Any]] | None:
    """Who died or was ended, and when the others were back."""
    found = []
    for event in run.events("rank_failed", "hung", "went_back", "resumed"):
        kind = event["kind"]
        who = {
            "rank_failed": f"rank {text(event.get('culprit_rank'), 20)}",
            "hung": text(event.get("worker"), 60),
            "went_back": "servers",
        }.get(kind, "")
        found.append(
            {
                "t": finite(event.get("t")),
                "kind": kind,
                "who": who,
                "host": text(event.get("host", ""), 100),
                "step": finite(event.get("step")),
                "phase": text(event.get("phase", ""), 60),
                "cause": text(event.get("cause", event.get("source", "")), 300),
                "seconds": finite(event.get("seconds")),
            }
        )
    return found[-_MOST_ROWS:] or None


def _rounds(run: Run) -> dict[str, Any] | None:
    lead = next((file for file in run.ranks if "round" in file.tables), None)
    if lead is None:
        return None
    table = lead.tables["round"]
    measured = lead.tables.get("islands")
    return {
        "count": table.rows,
        "policy": text(next(iter(lead.events("round")), {}).get("policy", ""), 60),
        "step": _newest(table, "step"),
        "seconds": _newest(table, "seconds"),
        "distance": _newest(table, "distance"),
        "measured": None
        if measured is None
        else {"step": _newest(measured, "step"), "distance": _newest(measured, "distance")},
    }


def _newest(table: Table, column: str) -> list[float | int | None]:
    return finite_list(table.column(column)[-_MOST_ROWS:])


def _queues(run: Run) -> dict[str, Any] | None:
    """How long the queues of parameter servers were, by seconds since the run began, whichever server led the log then."""
    tables = [file.tables["queues"] for file in run.ranks if "queues" in file.tables]
    if not tables:
        return None
    t = np.concatenate([table.column("t") for table in tables])
    order = np.argsort(t, kind="stable")[-_MOST_ROWS:]
    found: dict[str, Any] = {"time": finite_list(np.round(t[order] - began(run), 3))}
    for name in _QUEUES:
        found[name] = finite_list(np.concatenate([table.column(name) for table in tables])[order])
    return found


_QUEUES = ("todo", "in_hand", "waiting", "unapplied")


def _exchange(run: Run) -> dict[str, Any] | None:
    """Of the first process that says it, by step: by how much less was sent than plain sums would have, and what is not sent."""
    table = next((file.tables["exchange"] for file in run.ranks if "exchange" in file.tables), None)
    if table is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = table.column("dense_bytes") / table.column("sent_bytes")
    return {
        "step": _newest(table, "step"),
        "ratio": finite_list(ratio[-_MOST_ROWS:]),
        "residual_norm": _newest(table, "residual_norm"),
    }


def _compression(run: Run) -> dict[str, Any] | None:
    """What was sent beside what the same gradients are as they are, where ranks or workers said both."""
    name = run.plan.get("compress")
    if not isinstance(name, str):
        return None
    tables = [file.tables["exchange"] for file in run.ranks if "exchange" in file.tables]
    if tables:
        # As they stood at the newest word of each: restarts begin again at 0, and their ratio is the same.
        sent, dense = (sum(table.last(column) for table in tables) for column in ("sent_bytes", "dense_bytes"))
        kept = sum(as_number(event.get("residual_bytes", 0)) for event in run.events("traffic"))
        return {
            "codec": text(name, 60),
            "sent_bytes": finite(sent),
            "dense_bytes": finite(dense),
            "residual_bytes": finite(kept) if run.events("traffic") else None,
        }
    events = run.events("traffic")
    residual = sum(as_number(event.get("residual_bytes", 0)) for event in events)
    sent = sum(as_number(event.get("pushed_bytes")) for event in events)
    pulled = sum(as_number(event.get("pulled_bytes")) for event in events)
    return {
        "codec": text(name, 60),
        "sent_bytes": finite(sent) if events else None,
        # A worker gets the weights as they are once for each gradient that it sends.
        "dense_bytes": finite(pulled) if events else None,
        "residual_bytes": finite(residual) if events else None,
    }


def _worker_traffic(run: Run) -> list[dict[str, Any]] | None:
    found = [
        {
            "who": text(event["source"], 60),
            "pushed_bytes": finite(event.get("pushed_bytes")),
            "pulled_bytes": finite(event.get("pulled_bytes")),
            "residual_bytes": finite(event.get("residual_bytes", 0)),
        }
        for event in run.events("traffic")
    ]
    return found[:_MOST_WORKERS] or None


def _dropped(run: Run) -> list[dict[str, Any]] | None:
    """The newest word of each process."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for event in run.events("messages_dropped"):
        counts = event.get("counts")
        if isinstance(counts, dict) and counts:
            key = (text(event.get("process"), 60), text(event.get("instance_id", ""), 40))
            newest[key] = {text(reason, 60): finite(count) for reason, count in list(counts.items())[:20]}
    return [{"process": process, "counts": counts} for (process, _), counts in newest.items()][:_MOST_ROWS] or None


def _cache(run: Run) -> list[dict[str, Any]] | None:
    found = []
    for file in run.ranks[:_MOST_WORKERS]:
        table = file.tables.get("data_cache")
        if table is None:
            continue
        totals = {name: float(np.nansum(table.column(name))) for name in ("memory_hits", "disk_hits", "fetches")}
        asked = sum(totals.values())
        found.append(
            {
                "rank": file.rank,
                **{name: int(value) for name, value in totals.items()},
                "hit_rate": (totals["memory_hits"] + totals["disk_hits"]) / asked if asked else None,
                "fetched_bytes": finite(float(np.nansum(table.column("fetched_bytes")))),
                "fetch_seconds": finite(float(np.nansum(table.column("fetch_seconds")))),
                "wait_seconds": finite(float(np.nansum(table.column("wait_seconds")))),
            }
        )
    return found or None
