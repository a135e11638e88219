"""The log leader, beside shard 0's primary: it enters commands one after another, each at the backup before anyone is answered.

An update is exposed to followers, and a commit is answered, only when the backup has the input that made it: what was
acknowledged is kept. Requests that cannot be answered yet are parked here and decided again after every input. A log leader whose
input did not reach the backup has an update log that nobody else has; it is closed, and answers nothing more.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from itertools import accumulate
from typing import Any

from shoal.core.clock import Deadline
from shoal.paramserver.log.commands import Command, CommandLog
from shoal.paramserver.records import Answer, Finished, PushRecord, Refused, Update, Wait, WorkUnit
from shoal.paramserver.waiting import ChangeEvent, NotPrimary

Replicate = Callable[[int, Command], Awaitable[None]]
"""Brings an input, and its place in the row, to the backup; returns when it is there, or no backup is left to wait for."""

PARK_SECONDS = 1.0
"""A parked request is answered with nothing after this long, so that whoever asks can tell a quiet update log from a dead one."""
_UPDATES_KEPT = 256
_UPDATES_AT_ONCE = 128
_ENTRIES_AT_ONCE = 4096
"""Pushes in the updates of one answer: a body of the wire has 1 MB, and each takes some 30 bytes of it."""
_GONE_TOLD = 256
"""Departed workers that every answer to a follower names: fewer than are remembered (``members.GONE_KEPT``), because all are
sent each time, and a follower has heard of the older ones long ago."""


class LogLeader:
    """Keeps a command log for others to use.

    Args:
        command log: taken over; nobody else writes to it.
        replicate: see ``Replicate``. It raises when this server is the primary no longer.
        clock: seconds; the update log's time.
    """

    def __init__(
        self, command_log: CommandLog, *, replicate: Replicate, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.command_log = command_log
        self._replicate = replicate
        self._clock = clock
        self._lock = asyncio.Lock()
        self.exposed = command_log.update_log.closed
        """Updates that followers may see."""
        self._replicated = command_log.place
        """Inputs that the backup has."""
        self.changed = ChangeEvent()
        self.is_halting = False
        self.is_closed = False
        self._gone: dict[str, tuple[int, ...]] = {}
        for worker in command_log.update_log.gone[-_GONE_TOLD:]:
            # Whoever led the log before may not have told everyone.
            self._part_with(worker)
        self._followed: dict[str, tuple[int, int]] = {}
        """By follower: the epoch under which it asked last, and for which updates."""

    async def begin(self) -> None:
        """Take the update log over: every wait in it begins again, by this process's clock."""
        await self._enter(Command(kind="rebase", now=self._clock()))

    async def join(self, worker: str, index: int) -> None:
        """A worker enters at the current clock."""
        await self._enter(Command(kind="join", worker=worker, number=index, now=self._clock()))

    async def leave(self, worker: str) -> None:
        """A worker leaves the clock; what it was doing goes back to the queue."""
        await self._enter(Command(kind="leave", worker=worker, now=self._clock()))
        self._part_with(worker)

    async def take(self, worker: str, held: Collection[int]) -> WorkUnit | Finished | Wait | Refused:
        """The next work unit of a worker; a wait when there was none for a while, or the worker has to commit first."""
        limit = Deadline(seconds=PARK_SECONDS)
        while not self.is_halting:
            found = await self._enter(Command(kind="take", worker=worker, held=tuple(held), now=self._clock()))
            assert isinstance(found, WorkUnit | Finished | Wait | Refused)
            if not isinstance(found, Wait) or found.must_commit or limit.is_over:
                return found
            left = limit.remaining if found.until is None else min(limit.remaining, found.until - self._clock())
            await self.changed.wait(left)
        return Finished()

    async def commit(self, push: PushRecord) -> Answer:
        """A push is whole on all shards."""
        given = Command(kind="commit", worker=push.worker, push=push, now=self._clock())
        answer: Answer = await self._enter(given)
        return answer

    async def advance(self, made: PushRecord, memory: str) -> bool:
        """A step was made from outside; False when the run is being stopped, and no step counts any more."""
        if self.is_halting:
            return False
        await self._enter(Command(kind="advance", push=made, memory=memory, now=self._clock()))
        return True

    async def grow(self, version: int, samples: int) -> None:
        """There is a newer version of the data: the next epoch that is begun reads it."""
        await self._enter(Command(kind="grow", number=version, samples=samples, now=self._clock()))

    async def keep_time(self) -> None:
        """Close updates whose time is over; runs until it is cancelled or the log leader is closed."""
        while not self.is_closed:
            due = self.command_log.update_log.deadline()
            left = PARK_SECONDS if due is None else due - self._clock()
            if left > 0:
                await self.changed.wait(min(left, PARK_SECONDS))
            else:
                await self._enter(Command(kind="tick", now=self._clock()))

    async def updates(self, since: int, *, follower: str, epoch: int) -> tuple[Update, ...]:
        """Updates from ``since`` on, some of them if there are many; waits a moment for the first.

        Args:
            since: the first that is asked for; the follower has applied all before it.
            follower: who asks.
            epoch: of its view when it asked.
        """
        self._followed[follower] = (epoch, since)
        if self.exposed <= since and not self.is_final and not self.is_closed:
            await self.changed.wait(PARK_SECONDS)
        if self.is_closed:
            raise NotPrimary("the log is led elsewhere")
        kept = self.command_log.update_log.log(since)[: min(_UPDATES_AT_ONCE, max(0, self.exposed - since))]
        sizes = accumulate(len(made.entries) + len(made.dropped) for made in kept)
        # At least one, whatever its size.
        return kept[: max(1, sum(size <= _ENTRIES_AT_ONCE for size in sizes))]

    async def trim(self, followers: Collection[str], *, epoch: int) -> None:
        """Forget what all of these have applied, once it is much.

        Args:
            followers: the servers of the view.
            epoch: of the view. What was asked before it does not count: its sender may have been given an older copy of a
                shard since, and need what it seemed to have behind it.
        """
        self._followed = {follower: asked for follower, asked in self._followed.items() if follower in followers}
        known = [since for asked_under, since in self._followed.values() if asked_under >= epoch]
        if (
            len(known) == len(followers)
            and min(known, default=0) - self.command_log.update_log.first_kept > _UPDATES_KEPT
        ):
            await self._enter(Command(kind="trim", number=min(known), now=self._clock()))

    @property
    def gone(self) -> dict[str, tuple[int, ...]]:
        """By departed worker: its pushes that are in an update or will be; its others may be thrown away."""
        return self._gone

    @property
    def is_final(self) -> bool:
        """No update will come any more: everything is done, or the run stops and nobody is at work.

        Only of what the backup has too: an input under way may still bring an update, or give a work unit to somebody.
        """
        update_log = self.command_log.update_log
        if self._replicated != self.command_log.place:
            return False
        return update_log.is_finished or (self.is_halting and not update_log.num_in_hand)

    def halt(self) -> None:
        """Hand out nothing more."""
        if not self.is_halting:
            self.is_halting = True
            self.changed.notify()

    def close(self) -> None:
        """Answer nothing more: the log is led by somebody else, or the run went back to its checkpoint."""
        self.is_closed = True
        self.changed.notify()

    def snapshot(self) -> bytes:
        """Everything, with the input that is perhaps still on its way to the backup: whoever gets it again passes it over."""
        return self.command_log.export()

    def _part_with(self, worker: str) -> None:
        self._gone[worker] = tuple(sorted(self.command_log.update_log.committed(worker)))
        for old in list(self._gone)[:-_GONE_TOLD]:
            del self._gone[old]

    async def _enter(self, given: Command) -> Any:
        async with self._lock:
            if self.is_closed:
                raise NotPrimary("the log is led elsewhere")
            if self.is_halting and given.kind == "take":
                # It waited for its turn while the run was stopped: what is given now would never be written down.
                return Finished()
            outcome = self.command_log.enter(given)
            if isinstance(outcome, Wait):
                return outcome  # The update log has not changed, so there is nothing to tell.
            place = self.command_log.place
            try:
                await self._replicate(place, given)
                self._replicated = place
            finally:
                if self._replicated != place:
                    self.close()
            self.exposed = self.command_log.update_log.closed
        self.changed.notify()
        return outcome
