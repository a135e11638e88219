"""One coordinator's time in office, as the algorithm sees it: vectors that lie on the servers of its center's view.

Programs and evaluations are numbered from the center's epoch on: nothing of an earlier coordinator can be taken for this one's.
Everything is asked again until it is answered; a server does what it is asked twice once.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.comm.wire.errors import Refused, WireTimeout
from shoal.comm.wire.node import Node
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.elastic.view import View
from shoal.paramserver.lbfgs import Memory
from shoal.paramserver.messages import Advance, Message, Ran, Recall, Recalled, Run, Settle
from shoal.paramserver.patience import ATTEMPT_SECONDS
from shoal.paramserver.programs import Program, merge_measures

_EPOCH_BITS = 24
"""Programs and evaluations of one coordinator are fewer than two to the power of this."""


class Seat(Protocol):
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


class Drive:
    """One coordinator's time in office: the vectors as ``lbfgs.py`` sees them, on the servers of its center's view."""

    def __init__(
        self,
        node: Node,
        seat: Seat,
        view: View,
        *,
        deadline_seconds: float,
        evaluate: "Callable[[Drive, int, Batch], Awaitable[float]]",
    ) -> None:
        self._node, self._seat = node, seat
        self._history, self._num_shards = view.history, len(view.chains)
        self._deadline = deadline_seconds
        self._evaluate = evaluate
        self._number = self._evaluation = view.epoch << _EPOCH_BITS
        self._is_first = True
        self.batch = Batch(step=0, num_samples=1)
        self.num_duplicates = 0
        """Portions of the present step's batches that a second worker was given too."""

    def check(self) -> View:
        """The view now.

        Raises:
            Over: there is none, or it is of another history.
        """
        view = self._seat.view
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

    async def open(self, evaluation: int, num_portions: int) -> None:
        """Let every shard take gradients of an evaluation."""
        await self._run(Program(operations=()), begins=(evaluation, num_portions))

    async def collect(self) -> None:
        """Let every shard make what it took its gradient."""
        await self._run(Program(operations=()), collects=True)

    async def recall(self) -> Recalled:
        """What the coordinator before remembered."""
        found = await self._ask(0, Recall())
        assert isinstance(found, Recalled)
        return found

    async def settle(self, memory: Memory) -> None:
        """An iteration is done: write it into the book, and wait until every shard has come so far."""
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
