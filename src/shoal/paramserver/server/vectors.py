"""A shard whose updates are not made of pushes but by programs: its part of the vectors of L-BFGS, and of the gradient that is
being summed.

A version is an iteration. Within one the weights are wherever the line search tries; what a checkpoint takes of them is what the
last whole iteration left, and with it the pairs that the next one needs.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.comm.wire.listener import Request
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.optim.config import OptimConfig
from shoal.optim.groups import Groups
from shoal.paramserver.contact import Contact
from shoal.paramserver.lbfgs.algorithm import pair_names, start_name
from shoal.paramserver.lbfgs.vectors import GradientSum, ShardVectors
from shoal.paramserver.log.leader import PARK_SECONDS
from shoal.paramserver.messages import (
    Advance,
    Done,
    Part,
    Ran,
    Recall,
    Recalled,
    ReplicateProgram,
    Run,
    Settle,
)
from shoal.paramserver.programs import GRADIENT, WEIGHTS, Program
from shoal.paramserver.records import PushId, PushRecord, Update
from shoal.paramserver.server.gradients import NotFinite, refuse_nonfinite
from shoal.paramserver.server.replica import Replica, as_tensor
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.server.store import ShardStore
from shoal.paramserver.sharding import Model, Shard

_VECTOR, _SUM = "vector/", "sum/"


class LbfgsShard(ShardState):
    """A replica of one shard under ``update=lbfgs``. Not for two threads at once."""

    def __init__(self, shard: Shard, *, model: Model, groups: Groups, history: int) -> None:
        """A replica at version 0 whose weights are zero until ``load_weights`` or ``restore``.

        Args:
            shard: which part of the model it is.
            model: the trained parameters of the whole model.
            groups: of the whole model.
            history: pairs that are kept.
        """
        super().__init__(shard, model=model, optim=OptimConfig(name="sgd"), groups=groups)
        self._vectors = ShardVectors(self.weights)
        self._sum = GradientSum(self.weights)
        self._pairs = pair_names(history)
        for name in (GRADIENT, *self._pairs):
            # All there from the beginning: a checkpoint has the same ones of every shard at any moment.
            self._vectors.put(name, torch.zeros_like(self.weights))

    def move_weights(self, memory: Tensor) -> None:
        """Go on in other memory; programs find the weights there."""
        super().move_weights(memory)
        self._vectors.move_weights(self.weights)

    def run(
        self,
        number: int,
        program: Program,
        *,
        is_first: bool = False,
        begins: tuple[int, int] | None = None,
        collects: bool = False,
    ) -> tuple[float, ...]:
        """Run a coordinator's program; see ``messages.Run``. The one that was run last is answered again.

        Raises:
            RequestError: it is out of turn, reads what is not there, or collects a sum that is not whole.
        """
        if number == self._vectors.number:
            return self._vectors.answer
        if is_first and number > self._vectors.number:
            self._vectors.expect(number)
        self._vectors.check_turn(number)
        if collects:
            if not self._sum.is_done:
                raise RequestError(f"shard {self.shard.number} has not been given every work unit of the batch")
            self._vectors.put(GRADIENT, self._sum.total)
        answer = self._vectors.run(number, program)
        if begins is not None:
            self._sum.begin(*begins)
        return answer

    @torch.no_grad()
    def add_part(self, evaluation: int, unit: int, gradient: Tensor) -> bool:
        """Take a work unit's gradient, copied; False when nobody waits for it (any more).

        Raises:
            RequestError: it does not fit.
        """
        return self._sum.add(evaluation, unit, gradient.clone())

    def apply(self, record: Update, lr: float) -> None:
        """Count an iteration; what it did to the weights is done.

        Raises:
            RunError: it is not the next one.
        """
        if record.number != self.version:
            raise RunError(
                f"shard {self.shard.number} has version {self.version} and cannot count iteration {record.number}"
            )
        self.version += 1

    def parameters(self) -> dict[str, Tensor]:
        """The parts of the parameters as the last whole iteration left them, by name, as rows; live ones."""
        kept = start_name(self.version)
        flat = self._vectors[kept] if kept in self._vectors.names else self.weights
        return {piece.name: self._view(flat, piece) for piece in self.shard.pieces}

    def optimizer_state(self) -> dict[str, Tensor]:
        """The live pairs as ``<parameter>/<vector>``, in rows as in ``parameters``."""
        return {
            f"{piece.name}/{name}": self._view(self._vectors[name], piece)
            for piece in self.shard.pieces
            for name in self._pairs
        }

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of everything; what ``restore`` makes of it goes on as this one."""
        number, answer, vectors = self._vectors.snapshot()
        tensors = {f"{_VECTOR}{name}": vector for name, vector in vectors.items()}
        coming, counts = self._sum.export()
        tensors |= {f"{_SUM}{name}": tensor for name, tensor in coming.items()}
        values = {"shard": self.shard.number, "version": self.version, "number": number, "answer": list(answer)}
        return tensors, values | {"sum": counts}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Become the replica that ``export`` saw.

        Raises:
            RunError: it is of another shard.
        """
        weights = tensors.get(f"{_VECTOR}{WEIGHTS}")
        if weights is None or weights.shape != self.weights.shape or values["shard"] != self.shard.number:
            raise RunError(f"the snapshot of shard {values['shard']} does not fit shard {self.shard.number}")
        vectors = {name.removeprefix(_VECTOR): one for name, one in tensors.items() if name.startswith(_VECTOR)}
        self._vectors.restore(values["number"], values["answer"], vectors)
        coming = {name.removeprefix(_SUM): one for name, one in tensors.items() if name.startswith(_SUM)}
        self._sum.restore(coming, values["sum"])
        self.version = values["version"]


# A server's part in L-BFGS: programs and gradients of work units, done here, then at the backup, then acknowledged.
#
# Both are known by number, so whatever is asked twice is done once, and a backup that takes over answers what its primary would
# have. What the coordinator remembers is in the update log, and moves with the update that it is of.

_READY_SECONDS = 60.0


class _NotFiniteElsewhere(NotFinite):
    """This shard's part is finite; the one that has NaN counts it. All refuse it, or the sums would be of two workers."""


class VectorServer:
    """See the comment above.

    Args:
        store: the shards of the server.
        contact: to the center.
        on_not_finite: told of a gradient that is refused because of NaN or infinity.
    """

    def __init__(self, store: ShardStore, contact: Contact, *, on_not_finite: Callable[[PushId, str], None]) -> None:
        self._store = store
        self._contact = contact
        self._on_not_finite = on_not_finite
        self._refused: dict[tuple[int, int], tuple[int, str]] = {}
        """By shard and work unit: the evaluation in which its gradient was not finite, and whose it was."""

    async def handle(self, request: Request, body: Run | Part | ReplicateProgram | Recall | Advance | Settle) -> None:
        """Answer a coordinator, a worker or a primary.

        Raises:
            NotPrimary: somebody else answers for the shard.
        """
        try:
            match body:
                case Run():
                    replica = self._store.require(body.shard)
                    measures = await _run(replica, body)
                    await self._store.replicate(body.shard, ReplicateProgram(done=body))
                    await request.answer(Ran(measures=measures))
                case Part():
                    await self._take_part(request, body)
                case ReplicateProgram():
                    await self._mirror(request, body.done)
                case Recall() | Advance():
                    await self._keep_memory(request, body)
                case Settle():
                    await self._settle(request, body)
        except RequestError as error:
            await request.refuse("turn", str(error))

    async def _take_part(self, request: Request, part: Part) -> None:
        replica = self._store.require(part.shard)
        view = self._contact.view
        if view is None or not any(member.id == request.sender for member in view.workers):
            await request.refuse("stranger", f"worker {request.sender} is not a member")
            return
        dtype = str(_shard(replica).weights.dtype).removeprefix("torch.")
        if request.header.dtype != dtype:
            await request.refuse("shape", f"a gradient is sent as {dtype}, not as {request.header.dtype or 'nothing'}")
            return
        gradient = _gradient(replica, part, request.payload)
        try:
            self._check_finite(replica, part, gradient, request.sender)
        except NotFinite as error:
            if not isinstance(error, _NotFiniteElsewhere):
                self._on_not_finite(PushId(request.sender, part.unit), str(error))
            await request.refuse("not-finite", str(error))
            return
        await _add(replica, part, gradient)
        await self._store.replicate(part.shard, ReplicateProgram(done=part), request.payload)
        await request.answer(Done())

    def _check_finite(self, replica: Replica, part: Part, gradient: Tensor, worker: str) -> None:
        """Refuse a gradient that is not finite where the loss is: that worker is not to be trusted.

        When another worker finds the same it is the weights of this trial, and the line search has to see it: it goes back.

        Raises:
            NotFinite: the first to bring one.
        """
        if not math.isfinite(part.loss):
            return
        place = part.shard, part.unit
        evaluation, before = self._refused.get(place, (-1, worker))
        if evaluation == part.evaluation and before != worker:
            return
        try:
            what = f"work unit {part.unit} of evaluation {part.evaluation} by worker {worker}"
            refuse_nonfinite(gradient, replica.state.shard, what)
            if not part.is_finite:
                raise _NotFiniteElsewhere(f"{what} has NaN or infinity in another shard; it is not stored")
        except NotFinite:
            self._refused[place] = part.evaluation, worker
            raise

    async def _mirror(self, request: Request, done: Run | Part) -> None:
        replica = self._store.require_copy(request.sender, done.shard)
        async with asyncio.timeout(_READY_SECONDS):
            await replica.ready.wait()
        if isinstance(done, Run):
            await _run(replica, done)
        else:
            await _add(replica, done, _gradient(replica, done, request.payload))
        await request.answer(Done())

    async def _keep_memory(self, request: Request, body: Recall | Advance) -> None:
        log_leader = self._store.require_log_leader()
        if isinstance(body, Recall):
            update_log = log_leader.command_log.update_log
            await request.answer(Recalled(memory=update_log.memory, closed=update_log.closed, steps=update_log.steps))
            return
        if log_leader.command_log.update_log.has_units_under_way:
            # Of a rule whose steps workers make, or of a step that is not over: nobody who belongs here asks for it.
            await request.refuse("turn", f"step {body.number} has work units that workers do")
            return
        made = PushRecord(
            worker="",
            number=body.number,
            units=(),
            samples=body.samples,
            weight=float(body.samples),
            loss=body.loss,
            version=body.number,
            num_duplicates=body.num_duplicates,
        )
        if await log_leader.advance(made, body.memory):
            await request.answer(Done())
        else:
            await request.refuse("halting", "the run is being stopped")

    async def _settle(self, request: Request, settle: Settle) -> None:
        replica = self._store.require(settle.shard)
        limit = Deadline(seconds=PARK_SECONDS)
        while replica.version < settle.version:
            if limit.is_over:
                text = f"shard {settle.shard} is at version {replica.version}, not {settle.version}"
                await request.refuse("late", text)
                return
            await replica.changed.wait(limit.remaining)
            self._store.require(settle.shard)
        await request.answer(Done())


def _shard(replica: Replica) -> LbfgsShard:
    if not isinstance(replica.state, LbfgsShard):
        raise RequestError("this run has no programs: its update rule is not lbfgs")
    return replica.state


async def _run(replica: Replica, message: Run) -> tuple[float, ...]:
    shard, program = _shard(replica), Program(operations=message.operations)

    def run() -> tuple[float, ...]:
        return shard.run(
            message.number,
            program,
            is_first=message.is_first,
            begins=message.begins,
            collects=message.collects,
        )

    return await replica.change(run)


def _gradient(replica: Replica, part: Part, payload: memoryview | None) -> Tensor:
    shard = _shard(replica)
    expected = shard.weights.numel() * shard.weights.element_size()
    if payload is None or len(payload) != expected:
        got = 0 if payload is None else len(payload)
        raise RequestError(f"shard {part.shard} has {expected} bytes, and {got} came")
    return as_tensor(payload, shard.weights.dtype)


async def _add(replica: Replica, part: Part, gradient: Tensor) -> None:
    async with replica.lock:
        _shard(replica).add_part(part.evaluation, part.unit, gradient)
