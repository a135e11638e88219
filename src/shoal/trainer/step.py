"""One optimizer step: microbatches forward and backward, the reduction, the norm, the update. Nothing here logs, saves or waits.

The order of sums is the law of numerics': each replica adds its microbatches in order, then replicas are added. Every
decision (skip, clip, stop) is taken from reduced values, which are the same bits on every rank, so ranks never disagree.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.data.loader import Microbatch, StepBatch
from shoal.models.dropout import DropoutKey
from shoal.optim.build import set_rate
from shoal.optim.precision import LossScale
from shoal.parallel import batchnorm
from shoal.parallel.gradnorm import clip_, global_norm
from shoal.telemetry.board import RankSlot
from shoal.trainer.objective import Objective


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step found out; the same on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    """Loss and gradient are finite; the update was applied exactly then."""
    stop_requested: bool


class StepRunner:
    """The parts that a step uses, bound together once so that the step itself is short."""

    def __init__(
        self,
        *,
        model: nn.Module,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        dropout: DropoutKey,
        slot: RankSlot | None,
        clip: float | None,
        num_microbatches: int,
        empty_microbatch: Microbatch | None,
        allows_untouched: bool,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.world = world
        self.dropout = dropout
        self.slot = slot
        self.clip = clip
        self.num_microbatches = num_microbatches
        self.empty_microbatch = empty_microbatch
        self.allows_untouched = allows_untouched
        named = sorted(model.named_parameters())
        self.parameters = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.has_batch_norm = batchnorm.is_applied(model)
        self.passengers = self.bare_objective.passengers

    def run(self, batch: StepBatch, *, step: int, lr: float, loss_scale: LossScale, stop: bool) -> StepResult:
        """Take step number ``step`` (counted from 0) on ``batch``."""
        set_rate(self.optimizer, lr)
        self._forget_gradients()
        local_loss = self.accumulate(batch, step=step, scale=loss_scale.scale, stop=stop)
        self._refuse_untouched()
        loss, stop_requested = self._reduced(local_loss, scale=loss_scale.scale, stop=stop)
        self._enter("gradient norm", step)
        gradients = [(name, parameter.grad) for name, parameter in self.parameters if parameter.grad is not None]
        norm = global_norm(gradients, exact=self.clip is not None) / loss_scale.scale
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if is_finite:
            self._enter("optimizer", step)
            clip_([gradient for _, gradient in gradients], norm=norm, limit=self.clip, loss_scale=loss_scale.scale)
            self.optimizer.step()
        if self.has_batch_norm:
            self._enter("wait: batch norm statistics", step)
            batchnorm.fold(self.model, keep=is_finite)
        return StepResult(loss=loss, grad_norm=norm, is_finite=is_finite, stop_requested=stop_requested)

    def _refuse_untouched(self) -> None:
        """Refuse a parameter without a gradient: data parallelism would then leave its whole bucket unsummed, and say nothing.

        Raises:
            RunError: names the parameter and the setting.
        """
        if self.passengers is None or self.allows_untouched:
            return
        for name, parameter in self.parameters:
            if parameter.grad is None:
                raise RunError(
                    f"parameter {name!r} got no gradient in this step, so gradients could not be summed over replicas; "
                    "set train.unused_parameters=true, or take the parameter out of the model"
                )

    def _forget_gradients(self) -> None:
        # What `zero_grad` does, without its 0.1 ms for the profiler.
        for _, parameter in self.parameters:
            parameter.grad = None
        if self.passengers is not None:
            self.passengers.grad = None

    def _reduced(self, local_loss: torch.Tensor | float, *, scale: float, stop: bool) -> tuple[float, bool]:
        """The loss over all ranks, and whether any of them wishes to stop."""
        if self.passengers is None or self.passengers.grad is None:
            return float(local_loss), stop
        loss, wishes = (self.passengers.grad / scale).tolist()
        return loss, wishes > 0

    def accumulate(
        self, batch: StepBatch, *, step: int, scale: float, stop: bool = False, reduce: bool = True
    ) -> torch.Tensor | float:
        """Run this replica's microbatches and leave the reduced gradient in ``.grad``; the local share of the loss is returned.

        With ``reduce=False`` gradients stay this replica's own: that is how a non-finite gradient is traced to its rank.
        """
        objective = self.objective if reduce else self.bare_objective
        total = self._total_weight(batch)
        local_loss: torch.Tensor | float = 0.0
        microbatches = self._padded(batch)
        last = len(microbatches) - 1
        for index, microbatch in enumerate(microbatches):
            self._enter("forward", step)
            self.dropout.begin(step, microbatch.sample_ids)
            if self.has_batch_norm:
                batchnorm.begin_microbatch(self.model, index)
            with self._gathering(objective, is_last=index == last):
                loss = objective(microbatch, microbatch.weight / total, stop)
                self._enter("backward", step)
                (loss if scale == 1.0 else loss * scale).backward()
            local_loss = local_loss + loss.detach()
        if not microbatches:
            self._enter("backward", step)
            objective(None, 0.0, stop).backward()
        return local_loss

    @property
    def bare_objective(self) -> Objective:
        """The objective without its data-parallel wrapper."""
        wrapped = self.objective
        bare = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        assert isinstance(bare, Objective)
        return bare

    def _padded(self, batch: StepBatch) -> tuple[Microbatch, ...]:
        """This replica's microbatches, with empty ones at the end where batch norm needs every replica at every index."""
        if self.empty_microbatch is None:
            return batch.microbatches
        missing = min(self.num_microbatches, batch.num_samples) - len(batch.microbatches)
        return batch.microbatches + (self.empty_microbatch,) * missing

    def _total_weight(self, batch: StepBatch) -> float:
        if batch.total_weight is not None:
            return batch.total_weight
        weight = torch.tensor([batch.local_weight], dtype=torch.float64, device=self.world.device)
        return max(1.0, float(self.world.sum_(weight)))

    @staticmethod
    def _gathering(objective: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Reduce once per step, at the last microbatch; the ones before only add up locally."""
        if isinstance(objective, DistributedDataParallel) and not is_last:
            return objective.no_sync()
        return contextlib.nullcontext()

    def _enter(self, phase: str, step: int) -> None:
        if self.slot is not None:
            self.slot.enter(phase, step + 1)  # people count steps from 1
