"""A worker that hangs in its own compute: it notices by itself, says where, and ends, so that another is started in its place.

Its heart beats on and it answers the center, so to everyone else it is only slow; under a rule that waits for all shares of a
step the run would wait for ever. What is too long is measured by the worker's own portions: so many times their mean, and never
under a time that no hiccup of a machine lasts. The first portions have no deadline, because nothing is known yet and a compiler
may be at work. Time in which the whole process stood still (a pause, a laptop's lid) does not count.

A thread watches. It cannot when something holds the interpreter's lock; such a process is silent too, and the center takes it for
dead after ``dead_seconds``.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shoal.core.errors import EXIT_NO
from shoal.core.events import WorkerHung
from shoal.core.rundir import RunDir
from shoal.telemetry.lines import append_event
from shoal.trainer.servers.member import MemberPlace
from shoal.trainer.servers.portion import ShareResult
from shoal.trainer.servers.tidings import describe_hang
from shoal.trainer.servers.workline import Shares

_KNOWN_PORTIONS = 3
"""Portions after which a worker knows its mean."""
_MEAN_OVER = 20
_LOOK_SECONDS = 0.25

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Usual:
    """How long portions of this worker take."""

    count: int = 0
    seconds: float = 0.0
    """Mean of the last ones."""

    def and_one(self, seconds: float) -> "Usual":
        """With one more."""
        count = self.count + 1
        return Usual(count=count, seconds=self.seconds + (seconds - self.seconds) / min(count, _MEAN_OVER))

    def limit(self, multiple: float, least_seconds: float) -> float | None:
        """After how long a portion hangs; None while nothing is known."""
        return max(multiple * self.seconds, least_seconds) if self.count >= _KNOWN_PORTIONS else None


class WatchedShares:
    """A ``Shares`` whose every portion has a deadline.

    Args:
        shares: what computes.
        multiple: of the mean portion.
        least_seconds: no portion hangs before.
        on_hang: called in the watching thread with the step, the seconds so far and what is usual; once for a portion.
    """

    def __init__(
        self, shares: Shares, *, multiple: float, least_seconds: float, on_hang: Callable[[int, float, float], None]
    ) -> None:
        self._shares = shares
        self._multiple, self._least = multiple, least_seconds
        self._on_hang = on_hang
        self._usual = Usual()
        self._at: tuple[int, int] | None = None
        """Number of the portion that is computed now, and its step."""
        self._number = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="hang-watch", daemon=True).start()

    @property
    def num_samples(self) -> int:
        """See ``Shares``."""
        return self._shares.num_samples

    def run(self, step: int, share: int, *, part: int = 0, num_parts: int = 1) -> ShareResult:
        """See ``Shares``."""
        return self._timed(step, lambda: self._shares.run(step, share, part=part, num_parts=num_parts))

    def run_stretch(self, step: int, start: int, stop: int) -> float:
        """See ``Shares``."""
        return self._timed(step, lambda: self._shares.run_stretch(step, start, stop))

    def end(self) -> None:
        """See ``Shares``."""
        self._is_over.set()
        self._shares.end()

    def _timed(self, step: int, compute: Callable[[], T]) -> T:
        began = time.monotonic()
        self._number += 1
        self._at = (self._number, step)
        try:
            return compute()
        finally:
            self._at = None
            self._usual = self._usual.and_one(time.monotonic() - began)

    def _watch(self) -> None:
        seen, spent, looked = -1, 0.0, time.monotonic()
        while not self._is_over.wait(_LOOK_SECONDS):
            now, at = time.monotonic(), self._at
            # No more than a few looks' worth: for longer than that nothing here ran at all.
            since, looked = min(now - looked, 4 * _LOOK_SECONDS), now
            if at is None:
                continue
            seen, spent = (seen, spent + since) if at[0] == seen else (at[0], 0.0)
            limit = self._usual.limit(self._multiple, self._least)
            if limit is not None and spent > limit:
                self._on_hang(at[1], spent, self._usual.seconds)
                spent = float("-inf")


def watch_shares(shares: Shares, place: MemberPlace) -> Shares:
    """What computes, watched as the recipe wants it: a worker that hangs ends its process."""
    config = place.recipe.paramserver
    if config.hang_after == 0:
        return shares

    def end(step: int, seconds: float, usual_seconds: float) -> None:
        hung = WorkerHung(worker=place.name, step=step, seconds=seconds, usual_seconds=usual_seconds)
        try:
            print(describe_hang(hung.as_dict()), file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            if place.run_dir is not None:
                append_event(RunDir(place.run_dir).events(place.rank), hung, rank=place.rank)
        finally:
            # Also where nothing can be written any more: a full disk must not keep a hung worker.
            os._exit(EXIT_NO)

    return WatchedShares(shares, multiple=config.hang_after, least_seconds=config.hang_seconds, on_hang=end)
