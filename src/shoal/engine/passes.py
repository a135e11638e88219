"""The forward and backward passes of a step's microbatches on one rank, one after the other or through a pipeline's stages.

The order of sums is fixed: each replica adds its microbatches in order, then replicas are added.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.global_batch import ALONE, Replicas, gathering, refuse_absent, refuse_empty
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.data.loading.loader import Microbatch, StepBatch
from shoal.engine.batches.empty import Filler
from shoal.engine.hooks import Hooks
from shoal.engine.objective import Objective, kind_of
from shoal.engine.piggyback import RoundLosses
from shoal.parallel import batchnorm
from shoal.parallel.data import Reduction
from shoal.parallel.logical import LogicalReduction
from shoal.pipeline.runtime import Observe, Runtime
from shoal.randomness.dropout import DropoutKey
from shoal.schedules.schedule import Action, Schedule
from shoal.telemetry.stepclock import StepClock


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Runs microbatches on this rank. What is made of their gradients is the business of ``ParallelModel``."""

    objective: Objective
    """Model and loss."""
    wrapped: nn.Module
    """The objective as data parallelism has wrapped it; the objective itself where it has not."""
    reduction: Reduction
    """Sums gradients over replicas."""
    dropout: DropoutKey
    filler: Filler
    """What a replica without samples runs."""
    runtime: Runtime | None
    """Executes a pipeline's schedule; None where every rank runs whole forward passes."""
    mesh: Mesh
    hooks: Hooks
    has_batch_norm: bool
    """Batch norm's statistics have to be told which microbatch runs."""
    clock: StepClock | None
    """Hears what this rank does, and tells the supervisor; None where nobody asks."""
    replicas: Replicas = ALONE
    """Who a loss over the global batch is computed with."""
    schedule_for: Callable[[int], Schedule] | None = None
    """The schedule of a pipeline's step of so many microbatches; None without a pipeline."""

    def accumulate(self, batch: StepBatch, *, step: int, scale: float = 1.0, reduce: bool = True) -> RoundLosses:
        """Run this replica's microbatches and leave the reduced gradient in ``.grad``; returns the local share of the loss.

        That of every round, where replicas are absent. With ``reduce=False`` gradients are this replica's own, for torch's hooks
        to look at, and no hook of ours is called: so a gradient that is not finite is traced to its rank.
        """
        total = self.total_weight(batch)
        if not self.mesh.has_absent:
            return (self._accumulate(batch, total, step=step, scale=scale, reduce=reduce),)
        assert isinstance(self.reduction, LogicalReduction), "it is built for the mesh"
        losses: list[torch.Tensor | float | None] = []
        for number, part in enumerate(batch.rounds):
            # One without a share in this round goes along where forward passes wait for every replica.
            runs = part is not None or self.filler.microbatch is not None
            loss = (
                0.0
                if not runs
                else self._accumulate(
                    part or replace(batch, microbatches=()), total, step=step, scale=scale, reduce=reduce
                )
            )
            losses.append(None if part is None else loss)
            self.objective.metrics.end_round()
            if reduce:
                self.enter("wait: gradients of the other ranks", step)
                self.reduction.end_round(is_empty=part is None, is_last=number == len(batch.later))
        return tuple(losses)

    def _accumulate(
        self, batch: StepBatch, total: float, *, step: int, scale: float, reduce: bool
    ) -> torch.Tensor | float:
        objective = self.wrapped if reduce else self.objective
        microbatches: Sequence[Microbatch | None] = self.filler.fill(batch) or (None,)
        if self.runtime is not None:
            with nullcontext() if reduce else self.reduction.local():
                return self._run_pipeline(self.runtime, batch, total, step=step, scale=scale, is_told=reduce)
        local_loss: torch.Tensor | float = 0.0
        last = len(microbatches) - 1
        replicas = refuse_empty(self.replicas, num_samples=batch.num_samples)
        if self.mesh.has_absent:
            replicas = refuse_absent(self.mesh.num_logical, self.mesh.degree(Axis.DATA))
        for index, microbatch in enumerate(microbatches):
            self.enter("forward", step)
            if microbatch is not None:
                self.dropout.begin(step, microbatch.sample_ids)
                if self.has_batch_norm:
                    batchnorm.begin_microbatch(self.objective.model, index)
            with (
                gathering(replicas),
                self.reduction.microbatch(is_last=index == last) if reduce else self.reduction.local(),
            ):
                loss = objective(microbatch, microbatch.weight / total if microbatch is not None else 0.0)
                self.enter("backward", step)
                (loss if scale == 1.0 else loss * scale).backward()
            local_loss = local_loss + loss.detach()
            if reduce:
                for hook in self.hooks:
                    hook.on_microbatch(step, index, loss.detach())
        return local_loss

    def _run_pipeline(
        self, runtime: Runtime, batch: StepBatch, total: float, *, step: int, scale: float, is_told: bool
    ) -> torch.Tensor | float:
        microbatches = self.filler.fill(batch)
        count = len(microbatches)
        if count != runtime.schedule.grid.num_microbatches:
            assert self.schedule_for is not None, "a pipeline's passes know their schedules"
            runtime.follow(self.schedule_for(count))
        shares = [microbatch.weight / total for microbatch in microbatches]
        feed = self.feed(microbatches, shares=shares, steps=[step] * count, indices=range(count), scale=scale)
        runtime.observe = self.observer()
        with gathering(self.replicas):
            runtime.step(feed)
        if is_told:
            for index in range(count):
                for hook in self.hooks:
                    hook.on_microbatch(step, index, feed.losses.get(index))
        return feed.total(range(count))

    def feed(
        self,
        microbatches: Sequence[Microbatch],
        *,
        shares: Sequence[float],
        steps: Sequence[int],
        indices: Sequence[int],
        scale: float = 1.0,
    ) -> "StepFeed":
        """Microbatches as a pipeline's runtime asks for them; see ``StepFeed``."""
        return StepFeed(
            self.objective,
            microbatches,
            shares=shares,
            steps=steps,
            indices=indices,
            scale=scale,
            dropout=self.dropout,
            has_batch_norm=self.has_batch_norm,
            enter=self.enter,
        )

    def total_weight(self, batch: StepBatch) -> float:
        """Items of the global batch, over which its loss is the mean."""
        if batch.total_weight is not None:
            return batch.total_weight
        own = sum(part.local_weight for part in batch.rounds if part is not None)
        weight = torch.tensor([own], dtype=torch.float64, device=self.objective.device)
        return max(1.0, float(self.mesh.channel(Axis.DATA).all_reduce_(weight)))

    def enter(self, phase: str, step: int) -> None:
        """Say what this rank does now, where the supervisor looks."""
        if self.clock is not None:
            self.clock.enter(phase, step + 1)  # people count steps from 1

    def observer(self) -> Observe | None:
        """Who is told of every cell of a pipeline in this step: hooks that ask for it, and the clock that records spans."""
        clock, hooks = self.clock, self.hooks
        if clock is None or not clock.is_recording:
            return hooks.on_action if hooks.times_actions else None

        def observe(action: Action, begin: float, waited: float, end: float) -> None:
            clock.cell(str(action), begin, waited, end)
            if hooks.times_actions:
                hooks.on_action(action, begin, waited, end)

        return observe


class StepFeed:
    """Microbatches of one replica, of one step or of several that follow one another; see ``Feed`` of the runtime.

    Args:
        objective: model and loss.
        microbatches: in the order of the schedule's numbers.
        shares: of each in the loss that it is a part of.
        steps: the step that each belongs to, counted from 0; its dropout is drawn by it.
        indices: which microbatch of its step each is.
        scale: what the loss is multiplied by for the backward pass.
        dropout: of the model.
        has_batch_norm: the model's statistics have to be told which microbatch runs.
        enter: told what this rank does now, and at which step.
    """

    def __init__(
        self,
        objective: Objective,
        microbatches: Sequence[Microbatch],
        *,
        shares: Sequence[float],
        steps: Sequence[int],
        indices: Sequence[int],
        scale: float,
        dropout: DropoutKey,
        has_batch_norm: bool,
        enter: Callable[[str, int], None],
    ) -> None:
        self._objective = objective
        self._microbatches = microbatches
        self._shares, self._steps, self._indices = shares, steps, indices
        self._scale = scale
        self._dropout = dropout
        self._has_batch_norm = has_batch_norm
        self._enter = enter
        self.losses: dict[int, Tensor] = {}
        """Shares of the loss, without the scale, of the microbatches whose last stage is here."""

    def inputs(self, microbatch: int) -> Sequence[Any]:
        """See ``Feed``."""
        return self._objective.prepare(self._microbatches[microbatch])[0]

    def kind(self, microbatch: int) -> Hashable:
        """See ``Feed``."""
        return kind_of(self._microbatches[microbatch])

    @contextmanager
    def drawing(self, microbatch: int) -> Iterator[None]:
        """See ``Feed``."""
        step = self._steps[microbatch]
        self._enter("forward", step)
        self._dropout.begin(step, self._microbatches[microbatch].sample_ids)
        self._mark(microbatch)
        with self._objective.computing():
            yield

    def returning(self, microbatch: int) -> None:
        """See ``Feed``."""
        self._enter("backward", self._steps[microbatch])
        self._mark(microbatch)

    def loss(self, output: Any, microbatch: int) -> Tensor:
        """See ``Feed``."""
        own = self._microbatches[microbatch]
        inputs, targets = self._objective.prepare(own)
        share = self._objective.share_of(output, inputs, targets, own, self._shares[microbatch])
        self.losses[microbatch] = share.detach()
        return share if self._scale == 1.0 else share * self._scale

    def total(self, microbatches: Sequence[int]) -> Tensor | float:
        """The sum of some losses in their order; 0 where none ends here."""
        found: Tensor | float = 0.0
        for microbatch in microbatches:
            if microbatch in self.losses:
                found = found + self.losses[microbatch]
        return found

    def _mark(self, microbatch: int) -> None:
        if self._has_batch_norm:
            batchnorm.begin_microbatch(self._objective.model, self._indices[microbatch])
