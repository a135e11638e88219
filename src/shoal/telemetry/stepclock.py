"""Where the time of a rank's steps goes: the phases it enters, and how long it waited for other ranks along each axis.

The parts of a rank say what they begin (``enter``) where the supervisor looks; the clock hears it on the way. In a synchronous
run every rank's step takes as long as the slowest one's, so the length of a step tells nobody apart: what a rank did not wait
for, and did not load, it was busy with. ``phases`` together are the step, waits included.

In chosen steps everything is kept as spans too: phases, calls along axes, cells of a pipeline.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from shoal.telemetry.measurements import Spans
from shoal.telemetry.statusboard import RankStatus

MOST_SPANS = 20_000
"""Of one event; a model of many layers under tensor parallelism has thousands of calls in a step."""
_FIRST_SPANS = 2
"""The first step whose spans are recorded: that of number 1 allocates what the others use again."""
_SHORT = {
    "gradient norm": "norm",
    "wait: gradients of the other ranks": "gradients",
    "wait: other islands": "islands",
}
_OTHER = "other"


class Counter(Protocol):
    """What a step clock reads of a rank's traffic; ``comm/trafficcounter.py`` has it."""

    waits: dict[str, int]
    crossed: list[tuple[str, str, int, int, int]] | None


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Where the time of a step went."""

    seconds: float
    data_seconds: float
    """Part of it spent waiting for data."""
    wait_seconds: Mapping[str, float]
    """Parts of it spent waiting for other ranks, by axis."""
    phases: Mapping[str, float]
    """All of it, by what the rank did, waits included."""

    def share(self, num_steps: int) -> "StepTimes":
        """Of each of so many steps that cannot be told apart."""
        if num_steps == 1:
            return self
        return StepTimes(
            seconds=self.seconds / num_steps,
            data_seconds=self.data_seconds / num_steps,
            wait_seconds={axis: round(one / num_steps, 6) for axis, one in self.wait_seconds.items()},
            phases={name: round(one / num_steps, 6) for name, one in self.phases.items()},
        )


class StepClock:
    """One rank's clock, used by the thread that trains.

    Args:
        status: where the supervisor looks; None when nobody supervises.
        spans_every: record the spans of steps that are multiples of it, and of the second; 0 of none.
    """

    def __init__(self, status: RankStatus | None, *, spans_every: int = 0) -> None:
        self._status = status
        self._spans_every = spans_every
        self._counter: Counter | None = None
        self._step = 0
        self._phase = _OTHER
        self._began = self._since = time.perf_counter_ns()
        self._began_wall = time.time()
        self._spent: dict[str, int] = {}
        self._waits_before: dict[str, int] = {}
        self._data_ns = 0
        self._rows: list[tuple[str, str, int, int, int]] | None = None

    def follow(self, counter: Counter) -> None:
        """Read waits off the traffic of this rank from now on."""
        self._counter = counter
        self._waits_before = dict(counter.waits)

    @property
    def is_recording(self) -> bool:
        """True in a step whose spans are recorded."""
        return self._rows is not None

    def enter(self, phase: str, step: int) -> None:
        """Say that a phase begins; ``step`` is that of the supervisor's display, counted from 1."""
        if self._status is not None:
            self._status.enter(phase, step)
        self._step = step
        self._turn_to(_SHORT.get(phase) or phase.removeprefix("wait: "))

    def leave(self, phase: str) -> None:
        """Say that a phase begins which belongs to no other step than the last one."""
        self.enter(phase, self._step)

    def begin(self, first: int, last: int | None = None, *, phase: str = "data") -> None:
        """A step begins, or several that cannot be told apart, counted from 1; ``phase`` is its first."""
        if self._status is not None:
            self._status.enter(phase, first)
        self._step, self._phase = first, phase
        last = first if last is None else last
        self.restart(is_recorded=any(self._is_chosen(step) for step in range(first, last + 1)))

    def restart(self, *, is_recorded: bool = False) -> None:
        """Forget what was before; the phase that is under way goes on in the new step."""
        self._spent = {}
        self._data_ns = 0
        counter = self._counter
        if counter is not None:
            self._waits_before = dict(counter.waits)
            counter.crossed = [] if is_recorded else None
        self._rows = [] if is_recorded else None
        self._began_wall = time.time()
        self._began = self._since = time.perf_counter_ns()

    def restart_for(self, step: int) -> None:
        """As ``restart``, for a step of this number, in a loop that is not ours."""
        self.restart(is_recorded=self._is_chosen(step))

    def loaded(self) -> None:
        """The batch is there: what the step waited for data until now."""
        self._data_ns += self._turn_to(_OTHER)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, the step waits for data, in a loop that is not ours."""
        before = self._phase
        self._turn_to("data")
        try:
            yield
        finally:
            self._data_ns += self._turn_to(before)

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Inside, the rank is in a phase of which the supervisor is not told; after it, in none."""
        self._turn_to(phase)
        try:
            yield
        finally:
            self._turn_to(_OTHER)

    def cell(self, name: str, begin: float, waited: float, end: float) -> None:
        """A cell of a pipeline's schedule, by ``perf_counter``: when it began, how long it then waited, when it ended."""
        if self._rows is not None:
            start = int((begin + waited) * 1e9)
            self._rows.append(("cell", name, start, int(end * 1e9) - start, 0))

    def end(self) -> StepTimes:
        """The step has ended; the phase that is under way goes on outside of it."""
        self._turn_to(self._phase)
        waits = {} if self._counter is None else self._counter.waits
        before = self._waits_before
        return StepTimes(
            seconds=(self._since - self._began) / 1e9,
            data_seconds=self._data_ns / 1e9,
            wait_seconds={
                axis: round((total - before.get(axis, 0)) / 1e9, 6)
                for axis, total in waits.items()
                if total != before.get(axis, 0)
            },
            phases={name: round(spent / 1e9, 6) for name, spent in self._spent.items()},
        )

    def take_spans(self, step: int, *, num_steps: int = 1) -> Spans | None:
        """The spans of the step that has ended, as the event that is written; None where it was not chosen.

        Args:
            step: its number, of several the last.
            num_steps: steps that it was.
        """
        rows, self._rows = self._rows, None
        if rows is None:
            return None
        counter, began = self._counter, self._began
        if counter is not None:
            calls, counter.crossed = counter.crossed or [], None
            rows += [("comm", f"{axis} {name}", start, end - start, size) for axis, name, start, end, size in calls]
        rows.sort(key=lambda row: row[2])
        return Spans(
            step=step,
            num_steps=num_steps,
            begin=self._began_wall,
            spans=[
                (kind, name, round((start - began) / 1e9, 6), round(length / 1e9, 6), size)
                for kind, name, start, length, size in rows[:MOST_SPANS]
            ],
            left_out=max(0, len(rows) - MOST_SPANS),
        )

    def _is_chosen(self, step: int) -> bool:
        every = self._spans_every
        return every > 0 and (step == _FIRST_SPANS or step % every == 0)

    def _turn_to(self, phase: str) -> int:
        """Begin a phase; how long the one before took."""
        now, before = time.perf_counter_ns(), self._phase
        spent = now - self._since
        self._spent[before] = self._spent.get(before, 0) + spent
        if self._rows is not None and spent > 0:
            kind = "data" if before == "data" else "phase"
            self._rows.append((kind, before, self._since, spent, 0))
        self._phase, self._since = phase, now
        return spent
