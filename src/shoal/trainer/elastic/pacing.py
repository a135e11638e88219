"""Which ranks of an elastic run are slower than the others, from what each says of its own steps; no torch.

A rank adds up how long its steps kept it busy (``PaceMeter``), without its waits for others: the time that its thread was on a
processor or waited for one, and the time that it waited for its own data. Whoever supervises it looks a few times a second at
what all have added up (``PaceWatch``) and compares the means since the last look (``elastic/stragglers.py``).
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from shoal.elastic.stragglers import WINDOW, Phases, Straggler, find_stragglers
from shoal.launch.group.control import Pace

_LOOK_SECONDS = 0.5
_SCHEDULED = Path("/proc/thread-self/schedstat")


def busy_seconds() -> float:
    """How long this thread has been on a processor, or ready for one that others had. Where only the first is known, that."""
    try:
        running, waiting, _ = _SCHEDULED.read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(running) + int(waiting)) / 1e9


class PaceMeter:
    """What kept this rank busy since it began, for the thread that trains.

    Args:
        say: gets the new sums after every step.
        measure: busy seconds of this thread.
    """

    def __init__(self, say: Callable[[Pace], None], *, measure: Callable[[], float] = busy_seconds) -> None:
        self._say, self._measure = say, measure
        self._sums = Pace()
        self._last = measure()

    def begin(self) -> None:
        """Steps begin now: what came before is none of theirs."""
        self._last = self._measure()

    def step(self, *, data_seconds: float) -> None:
        """A step is over, of which so much was spent waiting for data."""
        now = self._measure()
        before, self._last = self._last, now
        self._sums = Pace(
            steps=self._sums.steps + 1,
            compute=self._sums.compute + (now - before),
            data=self._sums.data + data_seconds,
        )
        self._say(self._sums)


class PaceWatch:
    """Compares the ranks of a view.

    Args:
        factor: from which on a rank is named.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._window: deque[Mapping[str, Phases]] = deque(maxlen=WINDOW)
        self._last: dict[str, Pace] = {}
        self._named: set[str] = set()
        self._looked = 0.0

    def forget(self) -> None:
        """There is another view: steps are of another length."""
        self._window.clear()
        self._last, self._named = {}, set()

    def look(self, paces: Mapping[str, Pace], members: Collection[str], *, now: float) -> list[Straggler]:
        """Those who are slow and were not named before, under this view.

        Args:
            paces: what each has added up.
            members: of the view.
            now: this process's clock.
        """
        if now - self._looked < _LOOK_SECONDS or not set(members) <= paces.keys():
            return []
        if self._last.keys() != set(members):
            self._last = {member: paces[member] for member in members}
        done = {member: paces[member].steps - self._last[member].steps for member in members}
        if min(done.values(), default=0) < 1:
            return []
        self._looked = now
        self._window.append({member: _mean(paces[member], self._last[member]) for member in members})
        self._last = {member: paces[member] for member in members}
        found = [one for one in find_stragglers(self._window, factor=self._factor) if one.rank not in self._named]
        self._named |= {one.rank for one in found}
        return found


def _mean(now: Pace, before: Pace) -> Phases:
    steps = now.steps - before.steps
    return Phases(compute=(now.compute - before.compute) / steps, data=(now.data - before.data) / steps)
