"""Where the time of a worker's work units goes: to load samples, to compute, at the wire, and to wait for others.

From one work unit to the next is one event. So what a worker waits for after its work unit, until there is another one, belongs
to it: under a rule that waits for all shares of a step the fast workers wait, and the slow one is told from them by what is left.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from shoal.core.events import Event
from shoal.telemetry.eventlog import EventLog
from shoal.telemetry.measurements import WorkDone
from shoal.telemetry.stepclock import StepClock

_TAKE, _PULL, _PUSH = "take", "pull", "push"
WORKERS, SERVERS = "workers", "servers"
"""Whom a worker waits for, in the place of an axis."""


class WorkTimes:
    """The times of one process, under whatever names it works. Used by the thread that trains.

    Args:
        clock: the one that the model's passes tell of their phases; left out, one that nobody else uses.
        open_log: opens where events go, when there is the first; None: they are not kept.
    """

    def __init__(self, clock: StepClock | None = None, open_log: Callable[[], EventLog] | None = None) -> None:
        self._clock = clock or StepClock(None)
        self._open_log = open_log
        self._log: EventLog | None = None
        self._step = 0
        self._samples: int | None = None
        """Of the work unit that is under way, as soon as it is computed."""

    def begin(self, step: int) -> None:
        """A work unit of a step, counted from 1, is here, and the one before is over."""
        self.end()
        self._step = step
        self._clock.restart_for(step)

    def computed(self, samples: int) -> None:
        """The work unit, or so much of it, is computed."""
        self._samples = samples + (self._samples or 0)

    def end(self) -> None:
        """What was waited for after the last work unit is over. One that was not computed to its end is not told of."""
        samples, self._samples = self._samples, None
        if samples is None:
            return
        times = self._clock.end()
        spent = times.phases
        waits = {WORKERS: spent.get(_TAKE, 0.0), SERVERS: round(spent.get(_PULL, 0.0) + spent.get(_PUSH, 0.0), 6)}
        self.tell(
            WorkDone(
                step=self._step,
                samples=samples,
                seconds=times.seconds,
                data_seconds=times.data_seconds,
                wait_seconds={**waits, **times.wait_seconds},
                phases=spent,
            )
        )
        if (spans := self._clock.take_spans(self._step)) is not None:
            self.tell(spans)

    def tell(self, event: Event) -> None:
        """Write something down, where this process leaves something behind."""
        if self._log is None and self._open_log is not None:
            self._log = self._open_log()
        if self._log is not None:
            self._log.write(event)

    def taking(self) -> AbstractContextManager[None]:
        """Inside, this worker waits for a work unit."""
        return self._clock.inside(_TAKE)

    def pulling(self) -> AbstractContextManager[None]:
        """Inside, it waits for weights."""
        return self._clock.inside(_PULL)

    def pushing(self) -> AbstractContextManager[None]:
        """Inside, it waits until a gradient is pushed and committed."""
        return self._clock.inside(_PUSH)

    def computing(self) -> AbstractContextManager[None]:
        """Inside, it computes; the passes say more of it."""
        return self._clock.inside("compute")

    def close(self) -> None:
        """Write what is left."""
        if self._log is not None:
            self._log.close()
            self._log = None
