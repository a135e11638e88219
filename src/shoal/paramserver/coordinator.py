"""The coordinator of L-BFGS, beside the leading center: it drives the programs on the shards and hands the batch out.

It holds no vector, only numbers, and those are in the book of shard 0 after every iteration. When the center dies, the next one's
coordinator recalls them and walks the same path (``lbfgs.py`` says why); one that was only paused is refused by its epoch.

A batch is cut into portions that are much smaller than a worker's share, given to whoever is free, the last slow ones twice
(``handout.py``); the shards add their gradients in the order of the portions, and so are the losses added here.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.comm.wire.node import Node
from shoal.comm.wire.request import Request
from shoal.core.clock import Deadline
from shoal.paramserver.bell import Bell
from shoal.paramserver.drive import Batch, Drive, Over, Seat
from shoal.paramserver.handout import Handout, InOrder, Portion, cut_batch
from shoal.paramserver.lbfgs import LbfgsSettings, Memory, begin, change_batch, iterate, resume, skip
from shoal.paramserver.messages import Draw, Drawn

_PARK_SECONDS = 1.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How batches are cut."""

    global_batch: int
    """Samples of a step; at least as many as there are: every step has all of them, in one order."""
    workers: int
    """Of the plan."""

    def batch(self, step: int, num_samples: int) -> Batch:
        """The batch of a step."""
        if self.is_whole(num_samples):
            return Batch(step=0, num_samples=num_samples)
        return Batch(step=step, num_samples=self.global_batch)

    def is_whole(self, num_samples: int) -> bool:
        """True when a step has every sample."""
        return self.global_batch >= num_samples


class Evaluation:
    """One batch at one point: who computes what, and the loss so far."""

    def __init__(self, number: int, batch: Batch, portions: tuple[Portion, ...]) -> None:
        self.number = number
        self.batch = batch
        self.portions = portions
        self.handout = Handout(len(portions))
        self.loss = 0.0
        self._losses: InOrder[float] = InOrder(len(portions))

    @property
    def is_done(self) -> bool:
        """True when every portion has been counted."""
        return self.handout.is_done

    def finish(self, worker: str, portion: int, loss: float) -> None:
        """A worker has computed a portion, and every shard has its gradient."""
        if self.handout.finish(worker, portion):
            for ready in self._losses.offer(portion, loss):
                self.loss += ready


class Coordinator:
    """See the module.

    Args:
        node: the center's.
        seat: the center.
        settings: of the minimisation.
        batches: how they are cut.
        deadline_seconds: the longest wait for a server.
        tell: takes a line for people.
    """

    def __init__(
        self,
        node: Node,
        seat: Seat,
        *,
        settings: LbfgsSettings,
        batches: BatchSettings,
        deadline_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        self._node, self._seat = node, seat
        self._settings, self._batches = settings, batches
        self._deadline = deadline_seconds
        self._tell = tell
        self._bell = Bell()
        self._evaluation: Evaluation | None = None
        self._num_samples: int | None = None
        self._is_over = False

    async def run(self) -> None:
        """Drive whenever the center leads, until the last step is done; then go on answering that it is, until cancelled.

        Raises:
            RunError: a server did not answer within the deadline, or the minimisation cannot go on.
        """
        while True:
            view = self._seat.view
            if view is None or self._is_over:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            drive = Drive(self._node, self._seat, view, deadline_seconds=self._deadline, evaluate=self._evaluate)
            try:
                await self._go(drive)
                self._is_over = True
            except Over as reason:
                self._tell(f"the coordinator of epoch {view.epoch} ends: {reason}")
                await asyncio.sleep(_LOOK_SECONDS)
            finally:
                self._evaluation = None
                self._bell.ring()

    async def draw(self, request: Request, body: Draw) -> None:
        """Answer a free worker: with a portion, that there is none now, or that there is none any more."""
        worker = request.sender
        view = self._seat.view
        if view is None or view.find(worker) is None:
            await request.refuse("stranger", f"worker {worker} is not a member")
            return
        if body.num_samples < 1 or self._num_samples not in (None, body.num_samples):
            text = (
                f"{worker} has {body.num_samples} samples to train with, and the others {self._num_samples or 'some'}"
            )
            await request.refuse("unfit", text)
            return
        self._num_samples = body.num_samples
        if body.done is not None:
            self._take_result(worker, *body.done)
        self._bell.ring()
        limit = Deadline(seconds=_PARK_SECONDS)
        while not self._is_over:
            given = self._give(worker)
            if given is not None or limit.is_over:
                await request.answer(given or Drawn())
                return
            await self._bell.wait(min(limit.remaining, _LOOK_SECONDS))
        await request.answer(Drawn(is_over=True))

    def _take_result(self, worker: str, number: int, portion: int, loss: float) -> None:
        current = self._evaluation
        if current is not None and current.number == number:
            current.finish(worker, portion, loss)

    def _give(self, worker: str) -> Drawn | None:
        current = self._evaluation
        if current is None or current.is_done:
            return None
        # Whoever asks is free: what it was given before, and does not know of, was lost on its way.
        current.handout.lose(worker)
        handed = current.handout.take(worker, time.monotonic())
        if handed is None:
            return None
        stretch = current.portions[handed.portion]
        return Drawn(
            evaluation=current.number,
            portion=handed.portion,
            step=current.batch.step,
            start=stretch.start,
            stop=stretch.stop,
        )

    async def _go(self, drive: Drive) -> None:
        recalled = await drive.recall()
        num_samples = await self._count_samples(drive)
        is_whole = self._batches.is_whole(num_samples)
        drive.batch = self._batches.batch(recalled.closed, num_samples)
        if recalled.memory:
            memory = Memory.from_values(json.loads(recalled.memory), origin="the book of shard 0")
            memory = await resume(drive, memory, self._settings)
        else:
            first = await begin(drive, self._settings)
            memory = replace(first, iteration=recalled.closed, first=recalled.closed)
        is_fresh = True
        while memory.iteration < recalled.steps:
            if not (is_whole or is_fresh):
                drive.batch = self._batches.batch(memory.iteration, num_samples)
                memory = await change_batch(drive, memory)
            is_fresh = False
            after = await iterate(drive, memory, self._settings)
            if after.iteration == memory.iteration:
                after = await skip(drive, after)
            memory = after
            await drive.settle(memory)

    async def _count_samples(self, drive: Drive) -> int:
        while self._num_samples is None:
            drive.check()
            await self._bell.wait(_LOOK_SECONDS)
        return self._num_samples

    async def _evaluate(self, drive: Drive, number: int, batch: Batch) -> float:
        """Hand a batch out, and wait until all of it has come back."""
        portions = cut_batch(batch.num_samples, self._batches.workers)
        await drive.open(number, len(portions))
        current = self._evaluation = Evaluation(number, batch, portions)
        self._bell.ring()
        known: frozenset[str] = frozenset()
        while not current.is_done:
            present = drive.workers()
            for gone in known - present:
                current.handout.lose(gone)
            known = present
            await self._bell.wait(_LOOK_SECONDS)
        self._evaluation = None
        drive.num_duplicates += current.handout.num_backups
        await drive.collect()
        return current.loss
