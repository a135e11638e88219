"""Where the time of a simulated step goes on one rank, in the words of a real run's events: waits, phases and spans.

A step's time is what its rank computes, then what it waits for along axes inside passes and after them, and what is left is
waiting for its neighbours: along ``pp`` where there is a pipeline, else along ``dp`` for the slowest replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.events import StepDone
from shoal.planner.simulation.result import SimulatedStep
from shoal.planner.simulation.trace import RankStreams, Span, Stream
from shoal.schedules.schedule import Kind, write_cell
from shoal.telemetry.measurements import Spans

_AXES = {
    Stream.TENSOR: "tp",
    Stream.CONTEXT: "cp",
    Stream.EXPERT: "ep",
    Stream.DATA: "dp",
    Stream.ZERO: "dp",
    Stream.PIPELINE: "pp",
}
_PHASES = {"update": "optimizer", "fixed": "other"}
_Interval = tuple[float, float]


@dataclass(frozen=True)
class SimulatedTimes:
    """What the events of one rank say of every step, by the time that the played one takes."""

    seconds: float
    wait_seconds: dict[str, float]
    phases: dict[str, float]
    rows: tuple[tuple[str, str, float, float, int], ...]

    def put_into(self, done: StepDone) -> StepDone:
        """A step of this rank, which took its own time."""
        scale = done.seconds / self.seconds if self.seconds > 0 else 0.0
        return replace(
            done,
            wait_seconds={axis: one * scale for axis, one in self.wait_seconds.items()},
            phases={name: one * scale for name, one in self.phases.items()},
        )

    def spans(self, done: StepDone, *, begin: float) -> Spans:
        """What the rank did in a step that began then."""
        scale = done.seconds / self.seconds if self.seconds > 0 else 0.0
        rows = [(kind, name, start * scale, length * scale, size) for kind, name, start, length, size in self.rows]
        return Spans(step=done.step, begin=begin, spans=rows)


def times_of(simulated: SimulatedStep, streams: RankStreams) -> SimulatedTimes | None:
    """Where a rank's time goes; None of an asynchronous step, which does not begin and end anywhere."""
    if simulated.is_asynchronous:
        return None
    seconds = simulated.step_seconds
    waits: dict[str, float] = {}
    phases: dict[str, float] = {}
    covered: list[_Interval] = []
    # What is computed first, then communication that nothing hides; transfers between stages go on beside both.
    for span in sorted(streams.spans, key=lambda one: (one.stream is not Stream.COMPUTE, one.start)):
        if span.stream is Stream.PIPELINE:
            continue
        alone = _left(span, covered)
        took = sum(end - start for start, end in alone)
        covered = sorted([*covered, *alone])
        phase = _phase_of(span)
        phases[phase] = phases.get(phase, 0.0) + took
        if span.stream is not Stream.COMPUTE:
            waits[_AXES[span.stream]] = waits.get(_AXES[span.stream], 0.0) + took
    idle = max(0.0, seconds - sum(phases.values()))
    if idle > 0:
        axis = "pp" if simulated.num_places > 1 else "dp"
        phases["wait"] = idle
        waits[axis] = waits.get(axis, 0.0) + idle
    rows = sorted((_row_of(span) for span in streams.spans), key=lambda row: row[2])
    return SimulatedTimes(
        seconds,
        {axis: one for axis, one in waits.items() if one > 0},
        {k: v for k, v in phases.items() if v > 0},
        tuple(rows),
    )


def _phase_of(span: Span) -> str:
    if span.cell is not None:
        return "forward" if all(action.kind is Kind.FORWARD for action in span.cell) else "backward"
    if span.stream is Stream.COMPUTE:
        return _PHASES.get(span.name, span.name)
    return "gradients" if span.name in ("reduce", "gather") else "wait"


def _row_of(span: Span) -> tuple[str, str, float, float, int]:
    length = span.end - span.start
    if span.cell is not None:
        return ("cell", write_cell(span.cell), span.start, length, 0)
    if span.stream is Stream.COMPUTE:
        return ("phase", _PHASES.get(span.name, span.name), span.start, length, 0)
    return ("comm", f"{_AXES[span.stream]} {span.name}", span.start, length, 0)


def _left(span: Span, covered: Sequence[_Interval]) -> list[_Interval]:
    """The parts of a span that no interval covers; they are sorted and do not overlap."""
    found, at = [], span.start
    for start, end in covered:
        if end <= at or start >= span.end:
            continue
        if start > at:
            found.append((at, start))
        at = max(at, end)
    if at < span.end:
        found.append((at, span.end))
    return found
