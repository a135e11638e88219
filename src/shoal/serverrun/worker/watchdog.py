"""A worker that hangs in its own compute: it notices by itself, says where, and ends, so that another is started in its place.

Its heart beats on and it answers the center, so to everyone else it is only slow; under a rule that waits for all shares of a
step the run would wait for ever. What is too long is measured by the worker's own work units: so many times the median of the
last ones, and never under a time that no hiccup of a machine lasts. The median, because a work unit that waited for a paused rank
of its group, or for a compiler, says nothing of the others and must not make the watch patient for as many times its length; only
twice its length for the next few, because a compiler may come again. The first work units have no deadline, because nothing is
known yet. Time in which the whole process stood still (a pause, a laptop's lid) counts nowhere, and a work unit that failed is
not one.

A thread watches. It cannot when something holds the interpreter's lock; such a process is silent too, and the center takes it for
dead after ``dead_seconds``.
"""

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shoal.core.errors import EXIT_NO
from shoal.core.events import WorkerHung
from shoal.core.rundir import RunDir
from shoal.paramserver.epochs import EpochSpan
from shoal.serverrun.notices import describe_hang
from shoal.serverrun.process import ProcessSpec
from shoal.serverrun.worker.connection import Shares
from shoal.serverrun.worker.shares import ShareResult
from shoal.telemetry.eventlog import append_event

_KNOWN_UNITS = 3
"""Work units after which a worker knows what is usual."""
_USUAL_OF = 20
"""The last ones, which say it."""
_TIMES_LONGEST = 2.0
_LOOK_SECONDS = 0.25
_LOOKS_MISSED = 4
"""For longer than so many looks' time nothing here ran at all."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Usual:
    """How long work units of this worker take."""

    last: tuple[float, ...] = ()
    """Seconds of the last ones."""

    @property
    def seconds(self) -> float:
        """Their median; 0 when there is none."""
        return statistics.median(self.last) if self.last else 0.0

    def and_one(self, seconds: float) -> "Usual":
        """With one more."""
        return Usual(last=(*self.last, seconds)[-_USUAL_OF:])

    def limit(self, multiple: float, least_seconds: float) -> float | None:
        """After how long a work unit hangs; None while nothing is known."""
        if len(self.last) < _KNOWN_UNITS:
            return None
        return max(multiple * self.seconds, _TIMES_LONGEST * max(self.last), least_seconds)


@dataclass(frozen=True, kw_only=True)
class Awake:
    """How long this process ran, by a thread of it that looks at the clock often: where it does not, all stood still."""

    looked: float
    """When, by a clock that goes on meanwhile."""
    still: float = 0.0
    """Seconds until then in which nothing ran."""

    def ran_until(self, now: float, allowed: float) -> float:
        """Seconds of running, from a beginning that is the same for all calls.

        Args:
            now: by that clock; nobody may have looked since a pause that is over.
            allowed: the longest time between two looks of a process that runs.
        """
        return now - self.still - max(0.0, now - self.looked - allowed)

    def and_look(self, now: float, allowed: float) -> "Awake":
        """With one more look."""
        return Awake(looked=now, still=now - self.ran_until(now, allowed))


@dataclass(frozen=True, kw_only=True)
class _At:
    """The work unit that is computed now."""

    number: int
    step: int
    began: float
    """By the time that this process ran."""


class WatchedShares:
    """A ``Shares`` whose every work unit has a deadline.

    Args:
        shares: what computes.
        multiple: of the usual work unit.
        least_seconds: no work unit hangs before.
        on_hang: called in the watching thread with the step, the seconds so far and what is usual; once for a work unit.
    """

    def __init__(
        self, shares: Shares, *, multiple: float, least_seconds: float, on_hang: Callable[[int, float, float], None]
    ) -> None:
        self._shares = shares
        self._multiple, self._least = multiple, least_seconds
        self._on_hang = on_hang
        self._usual = Usual()
        self._awake = Awake(looked=time.monotonic())
        self._at: _At | None = None
        self._number = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="hang-watch", daemon=True).start()

    @property
    def num_samples(self) -> int:
        """See ``Shares``."""
        return self._shares.num_samples

    def run(
        self, step: int, share: int, *, part: int = 0, num_parts: int = 1, data: EpochSpan | None = None
    ) -> ShareResult:
        """See ``Shares``."""
        return self._timed(step, lambda: self._shares.run(step, share, part=part, num_parts=num_parts, data=data))

    def run_span(self, step: int, start: int, stop: int) -> float:
        """See ``Shares``."""
        return self._timed(step, lambda: self._shares.run_span(step, start, stop))

    def end(self) -> None:
        """See ``Shares``."""
        self._is_over.set()
        self._shares.end()

    def _timed(self, step: int, compute: Callable[[], T]) -> T:
        self._number += 1
        began = self._ran()
        self._at = _At(number=self._number, step=step, began=began)
        try:
            result = compute()
        finally:
            self._at = None
        self._usual = self._usual.and_one(self._ran() - began)
        return result

    def _ran(self) -> float:
        return self._awake.ran_until(time.monotonic(), _LOOKS_MISSED * _LOOK_SECONDS)

    def _watch(self) -> None:
        told = 0
        while not self._is_over.wait(_LOOK_SECONDS):
            self._awake = self._awake.and_look(time.monotonic(), _LOOKS_MISSED * _LOOK_SECONDS)
            at, limit = self._at, self._usual.limit(self._multiple, self._least)
            if at is None or limit is None or at.number == told:
                continue
            spent = self._ran() - at.began
            if spent > limit:
                told = at.number
                self._on_hang(at.step, spent, self._usual.seconds)


def watch_shares(shares: Shares, spec: ProcessSpec) -> Shares:
    """What computes, watched as the recipe wants it: a worker that hangs ends its process."""
    config = spec.recipe.paramserver
    if config.hang_after == 0:
        return shares

    def end(step: int, seconds: float, usual_seconds: float) -> None:
        hung = WorkerHung(worker=spec.name, step=step, seconds=seconds, usual_seconds=usual_seconds)
        try:
            print(describe_hang(hung.as_dict()), file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            if spec.run_dir is not None:
                append_event(RunDir(spec.run_dir).events(spec.rank), hung, rank=spec.rank)
        finally:
            # Also where nothing can be written any more: a full disk must not keep a hung worker.
            os._exit(EXIT_NO)

    return WatchedShares(shares, multiple=config.hang_after, least_seconds=config.hang_seconds, on_hang=end)
