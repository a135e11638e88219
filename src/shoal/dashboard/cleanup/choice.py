"""Which runs of a folder go: a pure decision over what is known of them.

A run goes only if every condition that was given holds for it, so more conditions mean fewer deletions, and a request without any
condition is refused. Runs that go on, or of which nobody can say whether they do, always stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.core.errors import RequestError
from shoal.dashboard.terminal.drawing import age as say_age

Status = Literal["running", "silent", "completed", "interrupted", "failed"]
GONE: tuple[Status, ...] = ("completed", "interrupted", "failed")
"""States in which nothing goes on."""


@dataclass(frozen=True, kw_only=True)
class OldRun:
    """What the choice needs to know of a run."""

    name: str
    status: str
    is_locked: bool
    updated: float
    """Wall-clock seconds of the last thing that it wrote."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What was asked for; None and empty ask for nothing."""

    older_seconds: float | None = None
    """Nothing was written for so long."""
    keep: int | None = None
    """The newest so many stay of those that the other conditions take."""
    statuses: tuple[Status, ...] = ()
    """Only runs that ended like this."""
    names: str | None = None
    """Only runs with this in their names."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happens to a run, and why."""

    run: OldRun
    goes: bool
    reason: str


def choose(runs: Sequence[OldRun], conditions: Conditions, now: float) -> list[Outcome]:
    """A outcome on every run, the oldest first.

    Raises:
        RequestError: no condition was given, so that every run would go.
    """
    if conditions == Conditions():
        raise RequestError(
            "prune without a condition would take every run; give --older 30d, --keep N, --failed, --interrupted, "
            "--completed or --name TEXT"
        )
    outcomes = [_judge(run, conditions, now) for run in sorted(runs, key=lambda run: (run.updated, run.name))]
    if conditions.keep is None:
        return outcomes
    going = [outcome.run.name for outcome in outcomes if outcome.goes]
    kept = set(going[max(0, len(going) - conditions.keep) :])
    return [
        replace(outcome, goes=False, reason=f"among the newest {conditions.keep} of these")
        if outcome.run.name in kept
        else outcome
        for outcome in outcomes
    ]


def _judge(run: OldRun, conditions: Conditions, now: float) -> Outcome:
    age = now - run.updated
    why_not = ""
    if run.is_locked:
        why_not = "in use by a process"
    elif run.status not in GONE:
        why_not = f"its status is {run.status}"
    elif age < 0:
        why_not = "its files are from the future"
    elif conditions.older_seconds is not None and age < conditions.older_seconds:
        why_not = f"written {say_age(age)} ago"
    elif conditions.statuses and run.status not in conditions.statuses:
        why_not = f"its status is {run.status}"
    elif conditions.names is not None and conditions.names not in run.name:
        why_not = "another name"
    return Outcome(run=run, goes=not why_not, reason=why_not or f"{run.status}, written {say_age(age)} ago")
