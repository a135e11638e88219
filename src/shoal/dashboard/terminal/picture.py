"""What ``shoal top`` shows of a run, as values: where every rank is by live.json, how it has been lately by its events.

The supervisor rewrites live.json each second, and it names a rank that says nothing or hangs; events tell of steps that are done.
Either may be missing: a run that has ended has no live ranks, one of an older release no live.json, one that begins no events.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.curves import busy_seconds
from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.status import live_age

LATELY = 20
"""Steps that speeds and waits are means of."""
_LATE_SECONDS = 5.0
"""After which a live.json that was not rewritten is said to be old."""
MARKS = ("hanging", "silent", "died")


@dataclass(frozen=True, kw_only=True)
class RankLine:
    """One rank, or one process of parameter servers."""

    rank: int | None
    name: str
    host: str = ""
    state: str = ""
    """running, ended, or one of ``MARKS``; empty where nobody knows."""
    step: int | None = None
    phase: str = ""
    phase_seconds: float | None = None
    heartbeat_age: float | None = None
    memory_bytes: float | None = None
    step_seconds: float | None = None
    """Mean of the last steps, as are the next two."""
    busy_seconds: float | None = None
    waits: Mapping[str, float] = field(default_factory=dict)
    """By axis; for data under ``data``."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A run at one moment."""

    name: str
    status: str
    plan: str
    at: float
    """Wall-clock seconds."""
    step: int | None
    total_steps: int | None
    loss: float | None
    validation_loss: float | None
    tokens_per_s: float | None
    eta_s: float | None
    ranks: tuple[RankLine, ...]
    warnings: tuple[str, ...]
    """What a person should look at, the worst first."""
    story: tuple[str, ...]
    """The newest lines of what has happened, the newest last."""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)

    @property
    def is_over(self) -> bool:
        """True when nothing more is to come."""
        return self.status in ("completed", "interrupted", "failed")


def take_picture(run: Run, row: Mapping[str, Any], story: Sequence[str], now: float) -> Picture:
    """The picture of a run.

    Args:
        run: as it is known.
        row: of the run, by the overview.
        story: the newest lines, the newest last.
        now: wall-clock seconds.
    """
    # Of a run that failed it says where every rank was at the end.
    live = run.live if row["status"] in ("running", "silent", "failed") else None
    ranks = tuple(_ranks(run, live, row))
    return Picture(
        name=str(row["name"]),
        status=str(row["status"]),
        plan=str(row["plan"] or ""),
        at=now,
        step=_whole(row["step"]),
        total_steps=_whole(row["total_steps"]),
        loss=_finite(row["loss"]),
        validation_loss=_finite(row["validation_loss"]),
        tokens_per_s=_finite(row["tokens_per_s"]),
        eta_s=_finite(row["eta_s"]),
        ranks=ranks,
        warnings=tuple(_warnings(ranks, None if live is None else live_age(run, now), row)),
        story=tuple(story),
    )


def _ranks(run: Run, live: Mapping[str, Any] | None, row: Mapping[str, Any]) -> list[RankLine]:
    hosts = {event["rank"]: str(event.get("host", "")) for event in run.events("placed")}
    files = {file.rank: file for file in run.ranks}
    culprit = row.get("culprit") or {}
    found: list[RankLine] = []
    hang = live.get("hang") if live is not None else None
    hanging = hang.get("rank") if isinstance(hang, dict) else None
    is_over = row["status"] == "failed"
    for entry in _dicts(live.get("ranks") if live is not None else None):
        rank = entry.get("rank") if isinstance(entry.get("rank"), int) else None
        state = str(entry.get("state", ""))[:20]
        has_hang = hanging is not None and hanging in (rank, entry.get("name"))
        if is_over:
            has_hang, state = False, "died" if rank is not None and culprit.get("rank") == rank else "ended"
        found.append(
            RankLine(
                rank=rank,
                name=str(entry.get("name", f"rank {rank}" if rank is not None else "?"))[:40],
                host=str(entry.get("host") or hosts.get(rank, ""))[:60],
                state="hanging" if has_hang else state,
                step=_whole(entry.get("step")),
                phase=str(entry.get("phase", ""))[:80],
                phase_seconds=None if is_over else _finite(entry.get("phase_seconds")),
                heartbeat_age=None if is_over else _finite(entry.get("heartbeat_age")),
                memory_bytes=_finite(entry.get("rss_bytes")),
                **_lately(files.pop(rank, None)),
            )
        )
    for rank, file in files.items():
        memory = _finite(file.tables["memory"].last("rss_bytes")) if "memory" in file.tables else None
        step = _finite(file.steps.last("step"))
        found.append(
            RankLine(
                rank=rank,
                name=f"rank {rank}",
                host=hosts.get(rank, "")[:60],
                state=_state_by_events(file, row, culprit),
                step=_whole(step),
                memory_bytes=memory,
                **_lately(file),
            )
        )
    return sorted(found, key=lambda line: (line.rank is None, line.rank or 0, line.name))


def _state_by_events(file: EventFile, row: Mapping[str, Any], culprit: Mapping[str, Any]) -> str:
    if row["status"] == "failed" and culprit.get("rank") == file.rank:
        return "died"
    if file.events("run_ended") or row["status"] in ("completed", "interrupted", "failed"):
        return "ended"
    return "silent" if row["status"] == "silent" else ""


def _lately(file: EventFile | None) -> dict[str, Any]:
    """Means of a rank's last steps."""
    if file is None or not file.timed.rows:
        return {}
    table = file.timed
    waits = {name[5:][:30]: _mean(table.column(name)) for name in table.names if name.startswith("wait:")}
    waits.setdefault("data", _mean(table.column("data_seconds")))
    return {
        "step_seconds": _mean(table.column("seconds")),
        "busy_seconds": _mean(busy_seconds(table)),
        "waits": {axis: seconds for axis, seconds in waits.items() if seconds is not None},
    }


def _mean(values: np.ndarray[Any, np.dtype[Any]]) -> float | None:
    last = values[-LATELY:].astype(np.float64)
    last = last[np.isfinite(last)]
    return float(last.mean()) if len(last) else None


def _warnings(ranks: Sequence[RankLine], live_seconds: float | None, row: Mapping[str, Any]) -> list[str]:
    found, named = [], None
    culprit = row.get("culprit")
    if culprit:
        named = culprit.get("rank")
        who = "" if named is None else f"{named} " if isinstance(named, str) else f"rank {named} "
        host = f"on {culprit['host']} " if culprit.get("host") else ""
        phase = f"in {culprit['phase']}" if culprit.get("phase") else ""
        verb = "failed " if row["status"] == "failed" and who else "hangs " if who else ""
        where = f"{who}{verb}{host}{phase}".strip()
        found.append(f"{where}: {culprit['cause']}" if where else str(culprit["cause"]))
    for line in ranks:
        if line.state == "silent" and line.heartbeat_age is not None and named not in (line.rank, line.name):
            age = f"{line.heartbeat_age:.0f} s"
            found.append(f"{line.name} has said nothing for {age}; it was in {line.phase or 'no phase'}")
    if live_seconds is not None and row["status"] != "failed" and live_seconds > _LATE_SECONDS:
        found.append(
            f"live.json was written {live_seconds:.0f} s ago: the supervisor says nothing, or its host's clock differs from ours"
        )
    return found


def most_important(ranks: Sequence[RankLine], most: int) -> list[RankLine]:
    """The ranks to show where there is no room for all: those with a mark, then the busiest; in their order."""
    if len(ranks) <= most:
        return list(ranks)
    by_need = sorted(ranks, key=lambda line: (line.state not in MARKS, -(line.busy_seconds or 0.0)))
    kept = {id(line) for line in by_need[: max(most, 1)]}
    return [line for line in ranks if id(line) in kept]


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _finite(value: object) -> float | None:
    found = as_number(value)
    return found if math.isfinite(found) else None


def _whole(value: object) -> int | None:
    found = _finite(value)
    return None if found is None else int(found)
