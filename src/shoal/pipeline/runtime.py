"""Executes a schedule: a rank goes through its row and does what each cell says.

The order is the schedule's and nothing else's. Receives are posted three messages ahead of their use; a send is not waited for.
What a microbatch needs for its backward pass is kept from its forward pass until then, which is what the schedule's peak of
activations counts.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.pipeline.cut import StagedModule
from shoal.pipeline.deferred import DeferredGradients, defer_weight_gradients
from shoal.pipeline.p2p import Endpoint, Message, MessageMeta, PointToPoint, TensorMeta
from shoal.pipeline.versions import Versions
from shoal.schedules.schedule import Action, Kind, Point, Result, Schedule, made_by, needs_of

NUM_AHEAD = 3
"""Messages beyond those of the next cell for which memory waits. Gloo moves nothing until both sides have posted: a message whose
receive is there is written by the thread that sends it, and one that was sent first is fetched later by threads of gloo, on cores
that compute. One cell ahead, 20 of the 32 receives of zbv on two ranks come after the send; three messages ahead, one does, the
first. Each costs the memory of a message."""


class Feed(Protocol):
    """What a step is made of: the microbatches and their loss."""

    def inputs(self, microbatch: int) -> Sequence[Any]:
        """The model's inputs, on the device."""

    def kind(self, microbatch: int) -> Hashable:
        """Equal for microbatches of equal shapes, on every rank alike."""

    def drawing(self, microbatch: int) -> AbstractContextManager[Any]:
        """Surrounds a stage's forward pass: dropout by key, autocast."""

    def returning(self, microbatch: int) -> None:
        """Called before a backward pass: parts of the forward pass may run again in it."""

    def loss(self, output: Any, microbatch: int) -> Tensor:
        """The microbatch's share of the loss, multiplied by whatever scale the backward pass is to have."""


class Sums(Protocol):
    """Where the gradients of a backward pass go."""

    def stage(self, stage: int) -> AbstractContextManager[None]:
        """Surrounds a backward pass of a stage."""


@dataclass
class _Kept:
    """What a stage keeps of a microbatch between its forward and its backward pass."""

    received: list[Tensor]
    outputs: list[Tensor]
    later: DeferredGradients | None = None


@dataclass
class _StepState:
    """The state of one step on one rank."""

    feed: Feed
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    expected: dict[Result, Message] = field(default_factory=dict)
    local: dict[Result, tuple[list[Tensor], MessageMeta]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)


Observe = Callable[[Action, float, float, float], None]
"""Told after an action, by ``perf_counter``: when it began, how long it then waited for other ranks, when it ended. That clock is
one for all processes of a machine."""


class Runtime:
    """One rank of a pipeline."""

    def __init__(
        self,
        chain: StagedModule,
        schedule: Schedule,
        *,
        rank: int,
        p2p: PointToPoint | None,
        sums: Sums | None = None,
        versions: Versions | None = None,
        update: Callable[[int], None] | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Bind a rank.

        Args:
            chain: the module.
            schedule: what to do.
            rank: whose row.
            p2p: to the other ranks; None when there are none.
            sums: keeps the gradients of stages apart where several hold a weight; what is to be done with them after the step
                is the caller's affair.
            versions: of this rank's weights, where they change before the pipeline is empty.
            update: called with a microbatch after whose backward pass weights change; takes the optimizer's step.
            observe: told of every action.
        """
        self.chain = chain
        self.rank = rank
        self.p2p = p2p
        self.sums = sums
        self.versions = versions
        self.update = update
        self.action: Action | None = None
        """What this rank does now; None between steps."""
        self.observe = observe
        self._first = 0
        self.follow(schedule)

    def follow(self, schedule: Schedule) -> None:
        """Do from the next step on what this schedule says: one of as many stages on the same ranks."""
        self.schedule = schedule
        self._grid = schedule.grid
        self._made, self._needed = row_places(schedule)
        self._posted = receives_by_cell(schedule, self.rank)
        self._split = {
            (action.stage, action.microbatch) for action in schedule.actions(self.rank) if action.kind is Kind.INPUT
        }

    def step(self, feed: Feed, *, first: int = 0) -> dict[int, Tensor]:
        """Do all cells of this rank's row; gradients are left in ``.grad``. The losses of microbatches that end here.

        Args:
            feed: the microbatches, from 0.
            first: how many microbatches of this training came before; versions are counted from there.
        """
        state = _StepState(feed)
        self._first = first
        row = list(self.schedule.actions(self.rank))
        for place, action in enumerate(row):
            self.action = action
            for result in self._posted[place]:
                self._post(state, result)
            if self.observe is None:
                self._do(state, action)
            else:
                self._do_observed(state, action, self.observe)
        self.settle()
        self.action = None
        return state.losses

    @torch.no_grad()
    def infer(self, inputs: Sequence[Any], kind: Hashable) -> tuple[bool, Any]:
        """One batch through all stages, without gradients: whether it ends on this rank, and then the model's output.

        All ranks of the pipeline call it together, for the same batches in the same order.

        Args:
            inputs: of the model.
            kind: equal for batches of equal shapes, on every rank alike.
        """
        kind, last = ("inference", kind), self._grid.num_stages - 1
        given: Sequence[Tensor] = ()
        for stage in (stage for stage in range(last + 1) if self._grid.rank_of(stage, 0) == self.rank):
            if stage > 0 and (source := self._grid.rank_of(stage - 1, 0)) != self.rank:
                assert self.p2p is not None
                given, _ = self.p2p.expect(self._endpoint((Point.OUTPUT, stage - 1, 0), source), kind).open()
            output = self.chain.run(stage, inputs, given)
            if stage == last:
                return True, output
            if (target := self._grid.rank_of(stage + 1, 0)) == self.rank:
                given = list(output)
            else:
                assert self.p2p is not None
                self.p2p.send(output, self._endpoint((Point.OUTPUT, stage, 0), target), kind)
        return False, None

    def clock(self) -> int:
        """When a microbatch comes to where this rank is with it now: the same numbers on all ranks of the pipeline."""
        assert self.action is not None
        num_stages, stage = self._grid.num_stages, self.action.stage
        way = stage if self.action.kind is Kind.FORWARD else 2 * num_stages - 1 - stage
        return 2 * num_stages * self.action.microbatch + way

    def settle(self) -> None:
        """Wait until everything has been sent."""
        if self.p2p is not None:
            self.p2p.flush()

    def _do(self, state: _StepState, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(state, action)
        elif action.kind is Kind.WEIGHT:
            self._weight(state, action)
        else:
            self._backward(state, action)

    def _do_observed(self, state: _StepState, action: Action, observe: Observe) -> None:
        """The same, with what it waits for taken in first, so that waiting can be told from computing."""
        begin = perf_counter()
        for result in needs_of(action, self._grid.num_stages):
            if result in state.expected:
                state.local[result] = self._open(state, result)
        ready = perf_counter()
        self._do(state, action)
        observe(action, begin, ready - begin, perf_counter())

    def _forward(self, state: _StepState, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = [] if stage == 0 else self._take(state, (Point.OUTPUT, stage - 1, microbatch))
        later = DeferredGradients() if (stage, microbatch) in self._split else None
        with state.feed.drawing(microbatch), defer_weight_gradients(later) if later is not None else nullcontext():
            weights = None if self.versions is None else self.versions.use(self._first + microbatch)
            output = self.chain.run(stage, state.feed.inputs(microbatch), received, weights)
        if stage == self._grid.num_stages - 1:
            loss = state.feed.loss(output, microbatch)
            state.losses[microbatch] = loss.detach()
            outputs = [loss]
        else:
            outputs = list(output)
            self._give(state, (Point.OUTPUT, stage, microbatch), outputs, self._grid.rank_of(stage + 1, microbatch))
        state.kept[stage, microbatch] = _Kept(received, outputs, later)

    def _backward(self, state: _StepState, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        kept = state.kept[stage, microbatch]
        with_gradient = [tensor for tensor in kept.outputs if tensor.requires_grad]
        grads: list[Tensor] | None = None
        if stage < self._grid.num_stages - 1:
            grads = self._take(state, (Point.GRADIENT, stage + 1, microbatch))
        state.feed.returning(microbatch)
        with _catching(kept.received) as arrived, self._sums_of(stage):
            torch.autograd.backward(with_gradient, grads)
        kept.outputs = []
        if stage > 0:
            back = [torch.zeros_like(tensor) if grad is None else grad for tensor, grad in arrived]
            self._give(state, (Point.GRADIENT, stage, microbatch), back, self._grid.rank_of(stage - 1, microbatch))
        kept.received = []
        if action.kind is Kind.BACKWARD:
            del state.kept[stage, microbatch]
            self._update(self._first + microbatch)

    def _update(self, microbatch: int) -> None:
        """Change weights without waiting for the pipeline to be empty, where that is the rule."""
        if self.versions is None or not self.versions.rule.ends_version(microbatch):
            return
        assert self.update is not None
        self.versions.take_gradients(microbatch)
        self.versions.before_update(microbatch)
        self.update(microbatch)
        self.versions.after_update(microbatch)

    def _weight(self, state: _StepState, action: Action) -> None:
        kept = state.kept.pop((action.stage, action.microbatch))
        assert kept.later is not None
        with self._sums_of(action.stage):
            kept.later.run()

    def _sums_of(self, stage: int) -> AbstractContextManager[None]:
        return nullcontext() if self.sums is None else self.sums.stage(stage)

    def _post(self, state: _StepState, result: Result) -> None:
        """Get ready for what another rank sends."""
        assert self.p2p is not None
        source = self._grid.rank_of(result[1], result[2])
        state.expected[result] = self.p2p.expect(self._endpoint(result, source), state.feed.kind(result[2]))

    def _take(self, state: _StepState, result: Result) -> list[Tensor]:
        """Tensors that a neighbouring stage made, ready to be computed with."""
        if result in state.local:
            tensors, meta = state.local.pop(result)
        else:
            tensors, meta = self._open(state, result)
        if result[0] is Point.OUTPUT:
            for tensor, part in zip(tensors, meta, strict=True):
                tensor.requires_grad_(part.has_gradient)
        return tensors

    def _open(self, state: _StepState, result: Result) -> tuple[list[Tensor], MessageMeta]:
        """A message of another rank, which by sending it shows how far it has come."""
        found = state.expected.pop(result).open()
        assert self.p2p is not None
        self.p2p.release(self._grid.rank_of(result[1], result[2]), self._made[result])
        return found

    def _give(self, state: _StepState, result: Result, tensors: Sequence[Tensor], target: int) -> None:
        if target != self.rank:
            assert self.p2p is not None
            endpoint, kind = self._endpoint(result, target), state.feed.kind(result[2])
            self.p2p.send(tensors, endpoint, kind, needed_at=self._needed[result])
            return
        meta = tuple(TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)
        state.local[result] = ([tensor.detach() for tensor in tensors], meta)

    def _endpoint(self, result: Result, peer: int) -> Endpoint:
        """One per stage and direction."""
        return Endpoint(peer, 2 * result[1] + (result[0] is Point.GRADIENT))


@contextmanager
def _catching(received: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """What was received and wants a gradient, with the gradient that a backward pass inside gives it, as it comes.

    In ``.grad`` it would have been laid out in memory as the tensor is, and the kernels of the stage before would add its numbers
    in another order than in one process.
    """
    wanted = [tensor for tensor in received if tensor.requires_grad]
    caught: dict[int, Tensor] = {}
    handles = [
        tensor.register_hook(partial(caught.__setitem__, place))  # type: ignore[no-untyped-call]
        for place, tensor in enumerate(wanted)
    ]
    arrived: list[tuple[Tensor, Tensor | None]] = []
    yield arrived
    for handle in handles:
        handle.remove()
    arrived += [(tensor, caught.get(place)) for place, tensor in enumerate(wanted)]
    for tensor in wanted:
        tensor.grad = None


def row_places(schedule: Schedule) -> tuple[dict[Result, int], dict[Result, int]]:
    """At which cell of its rank's row each result is made, and at which of a row it is first needed."""
    made: dict[Result, int] = {}
    needed: dict[Result, int] = {}
    for rank in range(schedule.grid.num_ranks):
        for place, action in enumerate(schedule.actions(rank)):
            made |= dict.fromkeys(made_by(action), place)
            for result in needs_of(action, schedule.grid.num_stages):
                if schedule.grid.rank_of(result[1], result[2]) != rank:
                    needed.setdefault(result, place)
    return made, needed


def receives_by_cell(schedule: Schedule, rank: int) -> tuple[tuple[Result, ...], ...]:
    """For each cell of a row, the results of other ranks whose receives are posted before it: in the order of their use."""
    grid, row = schedule.grid, list(schedule.actions(rank))
    far = [
        (place, result)
        for place, action in enumerate(row)
        for result in needs_of(action, grid.num_stages)
        if grid.rank_of(result[1], result[2]) != rank
    ]
    found: list[tuple[Result, ...]] = []
    num_posted = 0
    for place in range(len(row)):
        end = sum(at <= place for at, _ in far) + NUM_AHEAD
        found.append(tuple(result for _, result in far[num_posted:end]))
        num_posted = max(num_posted, min(end, len(far)))
    return tuple(found)
