"""Who hangs. A heartbeat says that a process runs; a phase counter says that it gets anywhere. Both are needed: a rank in an
endless loop has a fine heartbeat, and a rank that waits for it is healthy too.

``find_hang`` is pure: what the status board said and since when goes in, the process that hangs comes out. ``HangWatch``
remembers since when.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.launch.config import ProcessConfig
from shoal.telemetry.statusboard import StatusReading

WAIT_PREFIX = "wait:"
"""Phases in which a rank waits for others begin with this."""
_PAUSE_SECONDS = 2.0
"""A watch that has not looked for so long was stopped itself."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank that does not get on, and how that was seen."""

    rank: int
    reason: str
    is_host: bool = False
    """True where the whole host of the rank is gone, or cannot be reached."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of the group that is watched."""

    state: StatusReading
    pid: int
    is_running: bool = True
    has_phases: bool = True
    """False for a server: it enters no phases, and stands still when nobody asks it."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One process as the watch sees it. All times are monotonic seconds."""

    state: StatusReading
    started_at: float
    progress_at: float
    """When its phase counter was last seen to change."""
    is_running: bool = True
    has_phases: bool = True


class HangWatch:
    """Remembers when each process was first seen, and last got anywhere.

    Args:
        config: the deadlines.
        finds_stalls: False where processes that are not watched here may be what these wait for.
    """

    def __init__(self, config: ProcessConfig, *, finds_stalls: bool = True) -> None:
        self._config = config if finds_stalls else config.model_copy(update={"collective_deadline": math.inf})
        self._seen: dict[int, tuple[int, int, float, float]] = {}
        """By rank: process, phases entered, when it was first seen and when it last got anywhere."""
        self._looked = self._awake_since = time.monotonic()
        self._moving_until = 0.0
        """When one that enters phases was last seen to run."""

    def look(self, members: Sequence[Member], *, now: float) -> Hang | None:
        """The process that hangs, or None; to be called every second or more often.

        Args:
            members: by rank; those that have ended and are started again may be left out.
            now: the monotonic time.
        """
        if now - self._looked > _PAUSE_SECONDS:
            self._awake_since = now  # This process was stopped itself, so old heartbeats prove nothing.
        self._looked = now
        if any(member.has_phases and member.is_running for member in members):
            self._moving_until = now
        watched = [self._watch(member, now) for member in members]
        return find_hang(watched, now=now, awake_since=self._awake_since, config=self._config)

    def _watch(self, member: Member, now: float) -> Watched:
        state, rank = member.state, member.state.rank
        pid, count, started, progress = self._seen.get(rank, (0, 0, now, now))
        if pid != member.pid:
            started = progress = now
        elif count != state.phase_count:
            progress = now
        self._seen[rank] = (member.pid, state.phase_count, started, progress)
        return Watched(
            # Until it has signed its status, what is there is that of the process before it.
            state=state if state.pid == member.pid else replace(state, heartbeat=None, phase=""),
            started_at=started,
            # While others enter phases nobody looks at the progress of one that does not; the time begins when they are gone.
            progress_at=progress if member.has_phases else max(progress, self._moving_until),
            is_running=member.is_running,
            has_phases=member.has_phases,
        )


def is_waiting(phase: str) -> bool:
    """True for a phase in which a rank waits for others."""
    return phase.startswith(WAIT_PREFIX)


def find_hang(ranks: Sequence[Watched], *, now: float, awake_since: float, config: ProcessConfig) -> Hang | None:
    """The process that hangs, or None.

    Those that enter phases are held to their progress, all of them together, because one may wait for another; the others only
    where there is no other kind.

    Args:
        ranks: every process, by rank.
        now: the monotonic time.
        awake_since: since when the watch itself has run without a pause; what happened before that is nobody's fault (a suspended
            terminal, a frozen container).
        config: the deadlines.
    """
    running = [rank for rank in ranks if rank.is_running]
    moving = [rank for rank in ranks if rank.has_phases]
    return (
        _find_unstarted(running, now=now, awake_since=awake_since, deadline=config.start_deadline)
        or _find_silent(running, now=now, awake_since=awake_since, deadline=config.heartbeat_deadline)
        or _find_stalled(moving or ranks, now=now, awake_since=awake_since, deadline=config.collective_deadline)
    )


def _find_unstarted(running: Sequence[Watched], *, now: float, awake_since: float, deadline: float) -> Hang | None:
    for rank in running:
        if rank.state.heartbeat is None and now - max(rank.started_at, awake_since) > deadline:
            return Hang(rank=rank.state.rank, reason=f"no sign of life within {deadline:g} s of its start")
    return None


def _find_silent(running: Sequence[Watched], *, now: float, awake_since: float, deadline: float) -> Hang | None:
    ages = [
        (now - max(rank.state.heartbeat, awake_since), -rank.state.rank)
        for rank in running
        if rank.state.heartbeat is not None
    ]
    if not ages or max(ages)[0] <= deadline:
        return None
    age, minus_rank = max(ages)
    return Hang(rank=-minus_rank, reason=f"no sign of life for {age:.1f} s (deadline {deadline:g} s)")


def _find_stalled(ranks: Sequence[Watched], *, now: float, awake_since: float, deadline: float) -> Hang | None:
    running = [rank for rank in ranks if rank.is_running]
    if not running or any(now - max(rank.progress_at, awake_since) <= deadline for rank in running):
        return None
    busy = [rank.state for rank in running if not is_waiting(rank.state.phase)]
    if busy:
        state = min(busy, key=lambda state: (state.phase_count, state.rank))
        return Hang(rank=state.rank, reason=f"it runs but has got no further for {deadline:g} s")
    gone = [rank.state for rank in ranks if not rank.is_running]
    if gone:
        return Hang(
            rank=gone[0].rank, reason=f"it left while the others went on, and they waited {deadline:g} s for it"
        )
    state = min((rank.state for rank in running), key=lambda state: (state.phase_count, state.rank))
    return Hang(
        rank=state.rank,
        reason=f"all ranks wait for each other since {deadline:g} s, and this one is the furthest behind",
    )
