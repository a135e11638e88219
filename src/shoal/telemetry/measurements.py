"""Events of what a run measures of itself beside its steps: where time and bytes go, where ranks are, what was expected.

They are apart from ``core/events.py`` because nothing in a run depends on them: they are written for those who look at it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.core.events import Event


@dataclass(frozen=True, kw_only=True)
class Spans(Event):
    """What a rank did in one step, from moment to moment."""

    kind: ClassVar[str] = "spans"
    step: int
    """Its number, counted from 1; of several the last."""
    num_steps: int = 1
    """Steps in it: more than one where an asynchronous pipeline does not run empty between them."""
    begin: float
    """Wall time of its start on this rank's host, in seconds."""
    spans: Sequence[tuple[str, str, float, float, int]]
    """Rows of kind, name, start, seconds and bytes, by their starts, which count from ``begin``. Kinds are phase, data, comm (a
    call along an axis, such as ``dp all_reduce``) and cell (of a pipeline's schedule, such as ``2F0``)."""
    left_out: int = 0
    """Rows that were too many."""


@dataclass(frozen=True, kw_only=True)
class WorkDone(Event):
    """A worker of parameter servers was through with a work unit and with what had to be waited for after it.

    It is no ``step``: that is the servers' to tell, and several workers compute the shares of one.
    """

    kind: ClassVar[str] = "work"
    step: int
    """That the work unit is of, counted from 1."""
    samples: int
    """Those of the work unit."""
    seconds: float
    """From this work unit to the next one."""
    data_seconds: float
    """Part of it spent on loading data."""
    wait_seconds: Mapping[str, float]
    """Parts of it in which this worker waited: for ``workers`` until there was a work unit, for ``servers`` when it pulled and
    pushed, and for the other ranks of its group by axis."""
    phases: Mapping[str, float]
    """All of it, by what the worker did, waits included; ``take``, ``pull`` and ``push`` are those at the wire."""


@dataclass(frozen=True, kw_only=True)
class QueuesMeasured(Event):
    """How long the queues of parameter servers are, by the server that leads the log."""

    kind: ClassVar[str] = "queues"
    step: int
    """Steps that are done."""
    todo: int
    """Work units of steps that were begun, which nobody does yet."""
    in_hand: int
    """Work units that a worker does."""
    waiting: int
    """Work units whose gradients are whole and wait for the others of their update."""
    unapplied: int
    """Updates that are closed and not in the weights here."""


@dataclass(frozen=True, kw_only=True)
class ExchangeMeasured(Event):
    """What this process has sent of gradients or weights since it began, and what plain sums would have been."""

    kind: ClassVar[str] = "exchange"
    step: int
    sent_bytes: int
    dense_bytes: int
    residual_norm: float | None = None
    """Of what a codec has not sent yet, on this rank; None where none keeps that."""


@dataclass(frozen=True, kw_only=True)
class AxisTraffic(Event):
    """What has crossed between this rank and the others since its last ``run_started``."""

    kind: ClassVar[str] = "axis_traffic"
    step: int
    rows: Mapping[str, Sequence[float]]
    """Calls, bytes and seconds by axis and operation, such as ``dp all_reduce``; the seconds of the thread that trains."""


@dataclass(frozen=True, kw_only=True)
class RankLocation(Event):
    """Where a rank runs."""

    kind: ClassVar[str] = "placed"
    host: str
    device: str
    local_rank: int
    coordinates: Mapping[str, int]
    """Its place along each axis of the mesh that has more than one rank."""
    threads: int
    """Compute threads."""
    pid: int
    name: str = ""
    """Of a role of parameter servers; a rank has its number."""


@dataclass(frozen=True, kw_only=True)
class Forecast(Event):
    """What the plan should cost, as far as it is known when a run begins; None where nobody knows."""

    kind: ClassVar[str] = "forecast"
    source: str
    """Who says it: ``layout`` what the laid out model itself tells, ``rehearsal`` what was tried before, ``simulation``."""
    step_seconds: float | None = None
    bubble: float | None = None
    """Share of a step in which a rank of the pipeline waits for the others: with equal stages where the layout says it."""
    memory_bytes: Mapping[str, Mapping[str, int]] | None = None
    """By rank, and by what it is for: weights, gradients, optimizer, and other where it is known."""
    traffic: Mapping[str, Mapping[str, Sequence[float]]] | None = None
    """By rank, calls and bytes of one step by axis and operation."""


def read_rehearsal(page: Any) -> Forecast | None:
    """What a rehearsal left in ``forecast.json``; None where it is nothing that can be read: nothing depends on it.

    Args:
        page: the file's JSON.
    """
    try:
        return Forecast(
            source="rehearsal",
            step_seconds=page["seconds"],
            bubble=page["bubble"],
            memory_bytes={str(rank): _memory_of(one) for rank, one in enumerate(page["ranks"])},
            traffic={str(rank): one["traffic"] for rank, one in enumerate(page["ranks"])},
        )
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return None


def _memory_of(page: Mapping[str, Any]) -> dict[str, int]:
    state: dict[str, int] = dict(page["state_bytes"])
    peak = page.get("peak_bytes")
    return state if peak is None else {**state, "other": max(0, int(peak) - sum(state.values()))}


MEASUREMENTS: tuple[type[Event], ...] = (
    Spans,
    WorkDone,
    QueuesMeasured,
    ExchangeMeasured,
    AxisTraffic,
    RankLocation,
    Forecast,
)
