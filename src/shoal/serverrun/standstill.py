"""Who holds up a run with parameter servers: the watch of the ranks (``launch/hangs.py``), as the crew needs it.

The roles judge each other by their messages, and a worker that hangs in a portion ends itself (``hanging.py``) once it knows what
is usual. What is left is what nobody else can end: a server that is stopped and has no backup, a worker that hangs in its first
portion or holds the interpreter's lock. To the crew such a process is as good as dead.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.launch.config import ProcessConfig
from shoal.launch.hangs import Hang, Watched, find_hang
from shoal.telemetry.statusboard import StatusReading

_PAUSE_SECONDS = 2.0
_NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A server, or a rank of a worker, that runs."""

    state: StatusReading
    pid: int
    is_server: bool


class Standstill:
    """Remembers when each member was first seen, and last got anywhere."""

    def __init__(self, config: ProcessConfig) -> None:
        self._config = config
        self._silence = config.model_copy(update={"collective_deadline": _NEVER})
        self._seen: dict[int, tuple[int, int, float, float]] = {}
        """By rank: process, phases entered, when it was first seen and when it last got anywhere."""
        self._looked = self._awake_since = time.monotonic()

    def look(self, members: Sequence[Member], *, now: float) -> Hang | None:
        """The member to end, or None.

        Servers enter no phases: they stand still when nobody asks them. So only workers are held to their progress, all of them
        together, because one may wait for another; and servers when there is no worker left.

        Args:
            members: those that run.
            now: the monotonic time.
        """
        if now - self._looked > _PAUSE_SECONDS:
            self._awake_since = now  # This process was stopped itself, so old heartbeats prove nothing.
        self._looked = now
        watched = [(member, self._watch(member, now)) for member in members]
        workers = [one for member, one in watched if not member.is_server]
        return find_hang(
            [one for _, one in watched], now=now, awake_since=self._awake_since, config=self._silence
        ) or find_hang(
            workers or [one for _, one in watched], now=now, awake_since=self._awake_since, config=self._config
        )

    def _watch(self, member: Member, now: float) -> Watched:
        state, rank = member.state, member.state.rank
        pid, count, started, progress = self._seen.get(rank, (0, 0, now, now))
        if pid != member.pid:
            started = progress = now
        elif count != state.phase_count:
            progress = now
        self._seen[rank] = (member.pid, state.phase_count, started, progress)
        # Until it has claimed its rank status, what is there is the one before's.
        own = state if state.pid == member.pid else replace(state, heartbeat=None, phase="")
        return Watched(state=own, started_at=started, progress_at=progress)
