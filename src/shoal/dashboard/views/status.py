"""How a run is doing: status, culprit, speed. Pure functions of what is known of it and of the time."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.dashboard.runs.columns import as_number
from shoal.dashboard.runs.run import Run, Stillness

_LIVE_SECONDS = 6.0
"""A supervisor that rewrites live.json each second and has not for so long is gone."""
_QUIET_SECONDS = 60.0
_QUIET_STEPS = 20
_RECENT_STEPS = 20
_ENDED = ("completed", "interrupted", "failed")


@dataclass(frozen=True)
class Culprit:
    """Who ended a run, or holds it up."""

    rank: int | str | None
    host: str
    phase: str
    cause: str

    def as_json(self) -> dict[str, Any]:
        """For an answer."""
        return {"rank": self.rank, "host": self.host, "phase": self.phase, "cause": self.cause[:2000]}


def kind_of(run: Run) -> str:
    """training, servers or simulated."""
    if run.summary is not None and run.summary.get("simulated") is True:
        return "simulated"
    servers = run.plan.get("ps")
    return "servers" if isinstance(servers, int) and servers > 0 else "training"


def status_of(run: Run, now: float) -> str:
    """running, completed, interrupted, failed, or silent: it should go on, and nothing of it moves."""
    if kind_of(run) == "simulated":
        return "completed"
    started = max((as_number(event["t"]) for event in run.events("run_started")), default=0.0)
    summary = run.summary.get("status") if run.summary is not None else None
    # A summary that is older than the last start is of the run before.
    if summary in _ENDED and run.summary_changed_at >= started - 1.0:
        return str(summary)
    if run.live is not None and run.live.get("status") == "running":
        return "running" if live_age(run, now) < _LIVE_SECONDS and hang_of(run) is None else "silent"
    failed = [event for event in run.events("rank_failed") if as_number(event["t"]) >= started]
    if failed and failed[-1].get("restarting") is False:
        return "failed"
    ends = [event for event in run.events("run_ended") if as_number(event["t"]) >= started]
    if ends:
        return str(ends[-1].get("status")) if ends[-1].get("status") in _ENDED else "completed"
    usual = step_seconds(run) or 0.0
    quiet = _age(run.stillness, now, run.newest, run.live_changed_at)
    return "silent" if quiet > max(_QUIET_SECONDS, _QUIET_STEPS * usual) else "running"


def live_age(run: Run, now: float) -> float:
    """Seconds since live.json was rewritten, as far as can be known."""
    return _age(run.live_stillness, now, run.live_changed_at, as_number((run.live or {}).get("t")))


def _age(stillness: Stillness, now: float, *said: float) -> float:
    """Seconds since something changed: those that were seen to pass, or, where it was looked at too shortly, what clocks say.

    Clocks of the run's host and of the file server may be ahead of ours or behind it. One that says "a moment ago" is believed
    until nothing has come for a while; where none does, nothing is said to move before it was seen to.
    """
    if stillness.has_moved:
        return stillness.seconds
    return max(stillness.seconds, min(abs(now - each) for each in said if math.isfinite(each)))


def hang_of(run: Run) -> Culprit | None:
    """Who hangs, by live.json."""
    live = run.live
    if live is None or live.get("status") != "running":
        return None
    ranks = (
        [one for one in live.get("ranks") or () if isinstance(one, dict)] if isinstance(live.get("ranks"), list) else []
    )
    hang = live.get("hang")
    if isinstance(hang, dict):
        who = hang.get("rank", hang.get("name"))
        about = next((one for one in ranks if one.get("rank", one.get("name")) == who), {})
        cause = f"in the same phase for {as_number(hang.get('seconds')):.0f} s"
        return Culprit(_name(who), str(about.get("host", "")), str(hang.get("phase", "")), cause)
    for one in ranks:
        if one.get("state") == "silent":
            cause = f"no sign of life for {as_number(one.get('heartbeat_age')):.0f} s"
            who = one.get("rank", one.get("name"))
            return Culprit(_name(who), str(one.get("host", "")), str(one.get("phase", "")), cause)
    return None


def _name(who: object) -> int | str | None:
    return who if isinstance(who, int | str) else None


def culprit_of(run: Run, status: str) -> Culprit | None:
    """Who ended the run, or holds it up; None where all is well."""
    if status == "silent":
        found = hang_of(run)
        if found is not None or run.live is None or run.live.get("status") != "running":
            return found
        return Culprit(None, str(run.live.get("host", "")), "", "the supervisor has stopped rewriting live.json")
    if status != "failed":
        return None
    failed = run.events("rank_failed")
    if failed:
        last = failed[-1]
        return Culprit(
            _name(last.get("culprit_rank")),
            str(last.get("host", "")),
            str(last.get("phase", "")),
            str(last.get("cause")),
        )
    reports = sorted(run.errors.values(), key=lambda one: (one.get("peer_failure") is True, as_number(one.get("time"))))
    for report in reports:
        cause = f"{report.get('type')}: {report.get('message')}"
        return Culprit(_name(report.get("rank")), "", str(report.get("phase", "")), cause)
    return Culprit(None, "", "", "nothing in the run directory says why")


def step_of(run: Run) -> int:
    """Steps done."""
    lead = run.lead()
    if lead is not None:
        return int(lead.steps.last("step"))
    done = run.summary.get("steps") if run.summary is not None else None
    return done if isinstance(done, int) else 0


def total_steps(run: Run) -> int | None:
    """That the run was to do."""
    for values in (run.plan, run.summary or {}):
        total = values.get("total_steps")
        if isinstance(total, int) and 0 < total < 2**53:
            return total
    return None


def step_seconds(run: Run) -> float | None:
    """What a step takes, by the last of them."""
    lead = run.lead()
    if lead is None:
        return None
    found = float(np.median(lead.steps.column("seconds")[-_RECENT_STEPS:]))
    return found if math.isfinite(found) else None


def tokens_per_s(run: Run, status: str) -> float | None:
    """The speed: of the whole run where it is over, else of the last steps."""
    if status == "completed" and run.summary is not None:
        whole = as_number(run.summary.get("tokens_per_s"))
        if math.isfinite(whole):
            return whole
    lead = run.lead()
    if lead is None:
        return None
    seconds = float(lead.steps.column("seconds")[-_RECENT_STEPS:].sum())
    return float(lead.steps.column("tokens")[-_RECENT_STEPS:].sum()) / seconds if seconds > 0 else None


def eta_seconds(run: Run, status: str) -> float | None:
    """Until the last step."""
    total, each = total_steps(run), step_seconds(run)
    if status != "running" or total is None or each is None:
        return None
    return max(total - step_of(run), 0) * each


def proof_of(run: Run) -> str | None:
    """ok or failed, by the certificates in the run directory; None where there is none."""
    if not run.certificates:
        return None
    return "ok" if all(one.get("ok") is True for one in run.certificates) else "failed"
