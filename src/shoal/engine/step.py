"""One optimizer step: microbatches forward and backward, the reduction, the norm, the update. Nothing here logs, saves or waits.

The order of sums is fixed: each replica adds its microbatches in order, then replicas are added. Every
decision (skip, clip, stop) is taken from reduced values, which are the same bits on every rank, so ranks never disagree.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.mesh import Mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.data.loader import Microbatch, StepBatch
from shoal.engine.feed import StepFeed
from shoal.engine.objective import Objective
from shoal.optim.build import set_rate
from shoal.optim.precision import LossScale
from shoal.parallel import batchnorm
from shoal.parallel.data import Reduction, sum_partial_
from shoal.parallel.gradnorm import WholeNorms, clip_, global_norm
from shoal.pipeline.runtime import Runtime
from shoal.randomness.dropout import DropoutKey
from shoal.telemetry.statusboard import RankStatus

_MOST_NAMED = 5
"""Parameters that a message names; of more it says the number."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step found out; the same on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    """Loss and gradient are finite."""
    is_taken: bool
    """The update was applied: they are finite, and the loss is not above its limit."""
    stop_requested: bool


class StepRunner:
    """The parts that a step uses, bound together once so that the step itself is short."""

    def __init__(
        self,
        *,
        model: nn.Module,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        reduction: Reduction,
        norms: WholeNorms | None,
        partial: frozenset[str],
        mesh: Mesh,
        world: World,
        dropout: DropoutKey,
        rank_status: RankStatus | None,
        clip: float | None,
        num_microbatches: int,
        empty_microbatch: Microbatch | None,
        allows_untouched: bool,
        runtime: Runtime | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.reduction = reduction
        self.norms = norms
        self.partial = partial
        self.mesh = mesh
        self.world = world
        self.dropout = dropout
        self.rank_status = rank_status
        self.clip = clip
        self.num_microbatches = num_microbatches
        self.empty_microbatch = empty_microbatch
        self.allows_untouched = allows_untouched
        self.runtime = runtime
        """The pipeline's; None where every rank runs whole forward passes."""
        self.on_gradients: Callable[[Mapping[str, nn.Parameter], float], None] | None = None
        """Called with the summed gradients and the loss scale that is still in them, before they are clipped."""
        self.has_batch_norm = batchnorm.is_applied(model)
        self.passengers = self.bare_objective.passengers

    def run(
        self,
        batch: StepBatch,
        *,
        step: int,
        lr: float,
        loss_scale: LossScale,
        stop: bool,
        loss_limit: float = math.inf,
    ) -> StepResult:
        """Take step number ``step`` (counted from 0) on ``batch``, unless its loss is above ``loss_limit``."""
        set_rate(self.optimizer, lr)
        loss, stop_requested = self.compute(batch, step=step, scale=loss_scale.scale, stop=stop)
        if self.on_gradients is not None:
            self.on_gradients(self.reduction.updated, loss_scale.scale)
        self.enter("gradient norm", step)
        updated = self.reduction.updated
        gradients = {name: parameter.grad for name, parameter in updated.items() if parameter.grad is not None}
        norm = global_norm(gradients.items(), exact=self.clip is not None, norms=self.norms) / loss_scale.scale
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        is_taken = is_finite and loss <= loss_limit
        if is_taken:
            self.enter("optimizer", step)
            clip_(gradients.values(), norm=norm, limit=self.clip, loss_scale=loss_scale.scale)
            self.optimizer.step()
            self.reduction.publish()
        if self.has_batch_norm:
            self.enter("wait: batch norm statistics", step)
            batchnorm.fold(self.model, keep=is_taken)
        return StepResult(
            loss=loss, grad_norm=norm, is_finite=is_finite, is_taken=is_taken, stop_requested=stop_requested
        )

    def compute(self, batch: StepBatch, *, step: int, scale: float = 1.0, stop: bool = False) -> tuple[float, bool]:
        """Leave the summed gradient of a batch in ``.grad``; its loss over all ranks, and whether one of them wishes to stop."""
        self._forget_gradients()
        local_loss = self.accumulate(batch, step=step, scale=scale, stop=stop)
        self._sum_gradients(step)
        return self._reduced(local_loss, scale=scale, stop=stop)

    def _sum_gradients(self, step: int) -> None:
        """What is left of the reduction after the last backward pass."""
        self.enter("wait: gradients of the other ranks", step)
        self.reduction.finish()
        self._refuse_untouched()
        if self.partial:
            sum_partial_(self.reduction.updated, self.partial, self.mesh.channel(Axis.TENSOR))

    def _refuse_untouched(self) -> None:
        """Refuse a parameter without a gradient: data parallelism would then leave its whole bucket unsummed, and say nothing.

        Raises:
            RunError: names the parameter and the setting. No refusal: a bug of ours may have lost the gradient.
        """
        if self.mesh.replicas.size == 1 or self.allows_untouched:
            return
        names = list(self.reduction.untouched())
        if names:
            many = "s" if len(names) > 1 else ""
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise RunError(
                f"parameter{many} {', '.join(map(repr, names[:_MOST_NAMED]))}{more} got no gradient in this step, so "
                f"gradients could not be summed over replicas; set train.unused_parameters=true, or take the "
                f"parameter{many} out of the model"
            )

    def _forget_gradients(self) -> None:
        self.reduction.begin_step()
        if self.passengers is not None:
            self.passengers.grad = None

    def _reduced(self, local_loss: torch.Tensor | float, *, scale: float, stop: bool) -> tuple[float, bool]:
        """The loss over all ranks, and whether any of them wishes to stop."""
        if self.passengers is not None and self.passengers.grad is not None:
            loss, wishes = (self.passengers.grad / scale).tolist()
            return loss, wishes > 0
        # Tensor-parallel ranks all have the loss of their replica: one of them tells it.
        told = float(local_loss) if self.mesh.coordinate(Axis.TENSOR) == 0 else 0.0
        if self.mesh.everyone.size == 1:
            return told, stop
        # In the type that passengers ride in, so that the reported loss has the same bits under every reduction.
        dtype = self.bare_objective.precision.weight_dtype
        packet = torch.tensor([told, float(stop)], dtype=dtype, device=self.world.device)
        loss, wishes = self.mesh.everyone.all_reduce_(packet).tolist()
        return loss, wishes > 0

    def accumulate(
        self, batch: StepBatch, *, step: int, scale: float, stop: bool = False, reduce: bool = True
    ) -> torch.Tensor | float:
        """Run this replica's microbatches and leave the reduced gradient in ``.grad``; the local share of the loss is returned.

        With ``reduce=False`` gradients are this replica's own, for hooks to look at: so a non-finite one is traced to its rank.
        """
        objective = self.objective if reduce else self.bare_objective
        total = self._total_weight(batch)
        local_loss: torch.Tensor | float = 0.0
        microbatches = self.padded(batch)
        if self.runtime is not None:
            with nullcontext() if reduce else self.reduction.local():
                return self._run_pipeline(self.runtime, microbatches, total, step=step, scale=scale)
        last = len(microbatches) - 1
        for index, microbatch in enumerate(microbatches):
            self.enter("forward", step)
            self.dropout.begin(step, microbatch.sample_ids)
            if self.has_batch_norm:
                batchnorm.begin_microbatch(self.model, index)
            with self.reduction.microbatch(is_last=index == last) if reduce else self.reduction.local():
                loss = objective(microbatch, microbatch.weight / total, stop)
                self.enter("backward", step)
                (loss if scale == 1.0 else loss * scale).backward()
            local_loss = local_loss + loss.detach()
        if not microbatches:
            self.enter("backward", step)
            with self.reduction.microbatch(is_last=True) if reduce else self.reduction.local():
                objective(None, 0.0, stop).backward()
        return local_loss

    def _run_pipeline(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], total: float, *, step: int, scale: float
    ) -> torch.Tensor | float:
        feed = StepFeed(
            self.bare_objective,
            microbatches,
            shares=[microbatch.weight / total for microbatch in microbatches],
            steps=[step] * len(microbatches),
            indices=range(len(microbatches)),
            scale=scale,
            dropout=self.dropout,
            has_batch_norm=self.has_batch_norm,
            enter=self.enter,
        )
        runtime.step(feed)
        return feed.total(range(len(microbatches)))

    @property
    def bare_objective(self) -> Objective:
        """The objective without its data-parallel wrapper."""
        wrapped = self.objective
        bare = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        assert isinstance(bare, Objective)
        return bare

    def padded(self, batch: StepBatch) -> tuple[Microbatch, ...]:
        """This replica's microbatches, with empty ones at the end where a forward pass waits for every replica at every index."""
        if self.empty_microbatch is None:
            return batch.microbatches
        # A schedule has a fixed number of microbatches; elsewhere replicas only have to be in step.
        wanted = self.num_microbatches if self.runtime is not None else min(self.num_microbatches, batch.num_samples)
        missing = wanted - len(batch.microbatches)
        return batch.microbatches + (self.empty_microbatch,) * missing

    def _total_weight(self, batch: StepBatch) -> float:
        if batch.total_weight is not None:
            return batch.total_weight
        weight = torch.tensor([batch.local_weight], dtype=torch.float64, device=self.world.device)
        return max(1.0, float(self.mesh.channel(Axis.DATA).all_reduce_(weight)))

    def enter(self, phase: str, step: int) -> None:
        """Say what this rank does now, where the supervisor looks."""
        if self.rank_status is not None:
            self.rank_status.enter(phase, step + 1)  # people count steps from 1
