"""One coordinator's time in office, as the algorithm sees it: vectors that lie on the servers of its center's view.

Programs and evaluations are numbered from the center's epoch on: nothing of an earlier coordinator can be taken for this one's.
Everything is asked again until it is answered; a server does what it is asked twice once.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from shoal.comm.wire.errors import Refused, WireTimeout
from shoal.comm.wire.listener import Request
from shoal.comm.wire.node import Node
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.elastic.view import View
from shoal.paramserver.lbfgs.algorithm import LbfgsSettings, Memory, begin, change_batch, iterate, resume, skip
from shoal.paramserver.lbfgs.batches import BatchQueue, InOrder, cut_batch
from shoal.paramserver.messages import Advance, Draw, Drawn, Message, Ran, Recall, Recalled, Run, Settle
from shoal.paramserver.programs import Program, merge_measures
from shoal.paramserver.waiting import ATTEMPT_SECONDS, ChangeEvent

_EPOCH_BITS = 24
"""Programs and evaluations of one coordinator are fewer than two to the power of this."""


class LeadingCenter(Protocol):
    """The center that a coordinator sits beside."""

    @property
    def view(self) -> View | None:
        """What it stands for; None when it does not lead."""
        ...


class Over(Exception):
    """This coordinator's time is over: its center leads no more, everyone went back to the checkpoint, or the run stops."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one step minimises."""

    step: int
    """Whose samples, in the order of the run."""
    num_samples: int


class LbfgsDriver:
    """One coordinator's time in office: the vectors as ``algorithm.py`` sees them, on the servers of its center's view."""

    def __init__(
        self,
        node: Node,
        center: LeadingCenter,
        view: View,
        *,
        deadline_seconds: float,
        evaluate: "Callable[[LbfgsDriver, int, Batch], Awaitable[float]]",
    ) -> None:
        self._node, self._center = node, center
        self._history, self._num_shards = view.history, len(view.chains)
        self._deadline = deadline_seconds
        self._evaluate = evaluate
        self._number = self._evaluation = view.epoch << _EPOCH_BITS
        self._is_first = True
        self.batch = Batch(step=0, num_samples=1)
        self.num_duplicates = 0
        """Work units of the present step's batches that a second worker was given too."""

    def check(self) -> View:
        """The view now.

        Raises:
            Over: there is none, or it is of another history.
        """
        view = self._center.view
        if view is None:
            raise Over("its center does not lead any more")
        if view.history != self._history:
            raise Over("everyone went back to the checkpoint")
        return view

    def workers(self) -> frozenset[str]:
        """Who can be given work."""
        return frozenset(member.id for member in self.check().workers)

    async def run(self, program: Program) -> tuple[float, ...]:
        """Run a program on every shard; see ``Vectors``."""
        return await self._run(program)

    async def evaluate(self) -> float:
        """The objective at ``weights``; see ``Vectors``."""
        self._evaluation += 1
        return await self._evaluate(self, self._evaluation, self.batch)

    async def open(self, evaluation: int, num_units: int) -> None:
        """Let every shard take gradients of an evaluation."""
        await self._run(Program(operations=()), begins=(evaluation, num_units))

    async def collect(self) -> None:
        """Let every shard make what it took its gradient."""
        await self._run(Program(operations=()), collects=True)

    async def recall(self) -> Recalled:
        """What the coordinator before remembered."""
        found = await self._ask(0, Recall())
        assert isinstance(found, Recalled)
        return found

    async def settle(self, memory: Memory) -> None:
        """An iteration is done: write it into the update log, and wait until every shard has come so far."""
        await self._ask(
            0,
            Advance(
                number=memory.iteration - 1,
                loss=memory.loss,
                samples=self.batch.num_samples,
                memory=json.dumps(memory.as_values()),
                num_duplicates=self.num_duplicates,
            ),
        )
        self.num_duplicates = 0
        shards = range(self._num_shards)
        await asyncio.gather(*(self._ask(shard, Settle(shard=shard, version=memory.iteration)) for shard in shards))

    async def _run(
        self, program: Program, *, begins: tuple[int, int] | None = None, collects: bool = False
    ) -> tuple[float, ...]:
        self._number += 1
        is_first, self._is_first = self._is_first, False

        async def one(shard: int) -> tuple[float, ...]:
            message = Run(
                shard=shard,
                number=self._number,
                operations=program.operations,
                is_first=is_first,
                begins=begins,
                collects=collects,
            )
            found = await self._ask(shard, message)
            assert isinstance(found, Ran)
            return found.measures

        return merge_measures(program, await asyncio.gather(*map(one, range(self._num_shards))))

    async def _ask(self, shard: int, message: Message) -> Message:
        """Ask whoever answers for a shard, until somebody does.

        Raises:
            Over: it is not for this coordinator to ask any more.
            RunError: nobody did within the deadline.
        """
        limit = Deadline(seconds=self._deadline)
        while True:
            member = (view := self.check()).member(view.chains[shard].primary)
            try:
                answer = await self._node.connect(member.address).call(
                    message, key=f"shard/{shard}", deadline=ATTEMPT_SECONDS
                )
                assert isinstance(answer.body, Message)
                return answer.body
            except WireTimeout as error:
                trouble = str(error)
            except Refused as refused:
                if refused.code in ("turn", "halting"):
                    raise Over(refused.text) from refused
                trouble = f"{refused.code}: {refused.text}"
            if limit.is_over:
                raise RunError(
                    f"{type(message).__name__.lower()} of shard {shard}: server {member.name} did not do it within "
                    f"{self._deadline:g} s, in epoch {view.epoch}: {trouble}"
                )
            await asyncio.sleep(0.02)


# The coordinator of L-BFGS, beside the leading center: it drives the programs on the shards and hands the batch out.
#
# It holds no vector, only numbers, and those are in the update log of shard 0 after every iteration. When the center dies, the
# next one's coordinator recalls them and walks the same path (``algorithm.py`` says why); one that was only paused is refused by
# its epoch.
#
# A batch is cut into work units that are much smaller than a worker's share, given to whoever is free, the last slow ones twice
# (``batches.py``); the shards add their gradients in the order of the work units, and so are the losses added here.

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

    def __init__(self, number: int, batch: Batch, units: tuple[range, ...]) -> None:
        self.number = number
        self.batch = batch
        self.units = units
        self.batch_queue = BatchQueue(len(units))
        self.loss = 0.0
        self._losses: InOrder[float] = InOrder(len(units))

    @property
    def is_done(self) -> bool:
        """True when every work unit has been counted."""
        return self.batch_queue.is_done

    def finish(self, worker: str, unit: int, loss: float) -> None:
        """A worker has computed a work unit, and every shard has its gradient."""
        if self.batch_queue.finish(worker, unit):
            for ready in self._losses.offer(unit, loss):
                self.loss += ready


class Coordinator:
    """See the module.

    Args:
        node: the center's.
        center: the center.
        settings: of the minimisation.
        batches: how they are cut.
        deadline_seconds: the longest wait for a server.
        tell: takes a line for people.
    """

    def __init__(
        self,
        node: Node,
        center: LeadingCenter,
        *,
        settings: LbfgsSettings,
        batches: BatchSettings,
        deadline_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        self._node, self._center = node, center
        self._settings, self._batches = settings, batches
        self._deadline = deadline_seconds
        self._tell = tell
        self._changed = ChangeEvent()
        self._evaluation: Evaluation | None = None
        self._num_samples: int | None = None
        self._is_over = False

    async def run(self) -> None:
        """Drive whenever the center leads, until the last step is done; then go on answering that it is, until cancelled.

        Raises:
            RunError: a server did not answer within the deadline, or the minimisation cannot go on.
        """
        while True:
            view = self._center.view
            if view is None or self._is_over:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            drive = LbfgsDriver(
                self._node, self._center, view, deadline_seconds=self._deadline, evaluate=self._evaluate
            )
            try:
                await self._go(drive)
                self._is_over = True
            except Over as reason:
                self._tell(f"the coordinator of epoch {view.epoch} ends: {reason}")
                await asyncio.sleep(_LOOK_SECONDS)
            finally:
                self._evaluation = None
                self._changed.notify()

    async def draw(self, request: Request, body: Draw) -> None:
        """Answer a free worker: with a work unit, that there is none now, or that there is none any more."""
        worker = request.sender
        view = self._center.view
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
        self._changed.notify()
        limit = Deadline(seconds=_PARK_SECONDS)
        while not self._is_over:
            given = self._give(worker)
            if given is not None or limit.is_over:
                await request.answer(given or Drawn())
                return
            await self._changed.wait(min(limit.remaining, _LOOK_SECONDS))
        await request.answer(Drawn(is_over=True))

    def _take_result(self, worker: str, number: int, unit: int, loss: float) -> None:
        current = self._evaluation
        if current is not None and current.number == number:
            current.finish(worker, unit, loss)

    def _give(self, worker: str) -> Drawn | None:
        current = self._evaluation
        if current is None or current.is_done:
            return None
        # Whoever asks is free: what it was given before, and does not know of, was lost on its way.
        current.batch_queue.lose(worker)
        unit = current.batch_queue.take(worker, time.monotonic())
        if unit is None:
            return None
        samples = current.units[unit]
        return Drawn(
            evaluation=current.number,
            unit=unit,
            step=current.batch.step,
            start=samples.start,
            stop=samples.stop,
        )

    async def _go(self, drive: LbfgsDriver) -> None:
        recalled = await drive.recall()
        num_samples = await self._count_samples(drive)
        is_whole = self._batches.is_whole(num_samples)
        drive.batch = self._batches.batch(recalled.closed, num_samples)
        if recalled.memory:
            memory = Memory.from_values(json.loads(recalled.memory), origin="the update log of shard 0")
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

    async def _count_samples(self, drive: LbfgsDriver) -> int:
        while self._num_samples is None:
            drive.check()
            await self._changed.wait(_LOOK_SECONDS)
        return self._num_samples

    async def _evaluate(self, drive: LbfgsDriver, number: int, batch: Batch) -> float:
        """Hand a batch out, and wait until all of it has come back."""
        units = cut_batch(batch.num_samples, self._batches.workers)
        await drive.open(number, len(units))
        current = self._evaluation = Evaluation(number, batch, units)
        self._changed.notify()
        known: frozenset[str] = frozenset()
        while not current.is_done:
            present = drive.workers()
            for gone in known - present:
                current.batch_queue.lose(gone)
            known = present
            await self._changed.wait(_LOOK_SECONDS)
        self._evaluation = None
        drive.num_duplicates += current.batch_queue.num_backups
        await drive.collect()
        return current.loss
