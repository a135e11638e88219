"""Puts a model where its plan wants it and binds what a step needs: the one place where plan, mesh, model and optimizer meet."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.comm.mesh import Mesh, build_mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.data.loader import Microbatch
from shoal.data.splits import Splits
from shoal.models.dropout import DropoutKey, apply_keyed_dropout
from shoal.optim.build import build_optimizer, initialise_state
from shoal.optim.config import OptimConfig
from shoal.optim.precision import Precision
from shoal.parallel import batchnorm
from shoal.parallel.anatomy import Anatomy
from shoal.parallel.apply import Laid, apply_to_model, apply_to_objective
from shoal.parallel.config import ParallelConfig
from shoal.parallel.find.search import find_anatomy
from shoal.parallel.gradnorm import WholeNorms, build_norms
from shoal.parallel.reduction import Reduction
from shoal.parallel.rules import describe_facts
from shoal.telemetry.board import RankSlot
from shoal.trainer.config import TrainConfig
from shoal.trainer.layout import asks_the_model, check_settings
from shoal.trainer.objective import Objective
from shoal.trainer.scoring import Scoring, is_known
from shoal.trainer.state import Held, export_held, hash_held
from shoal.trainer.step import StepRunner


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A model laid out on this rank, and everything that was made along the way."""

    plan: Plan
    model: nn.Module
    mesh: Mesh
    anatomy: Anatomy
    laid: Laid
    dropout: DropoutKey
    objective: Objective
    wrapped: nn.Module
    reduction: Reduction
    norms: WholeNorms | None
    """How the parts of tensors make whole norms; None where every rank holds them whole."""
    optimizer: torch.optim.Optimizer

    def held(self) -> Held:
        """What this rank holds of the run's state."""
        return export_held(self.model, self.optimizer, self.reduction, self.laid)

    def watched(self) -> Held:
        """What several ranks must hold alike: ``held``, and the weights that forward passes read where those are others."""
        held = self.held()
        if self.plan.zero not in (1, 2):
            return held
        # A rank holds some rows, which nobody else has; the whole weights that it gathered are every replica's.
        named = self.model.named_parameters()
        whole = {f"gathered/{name}": parameter.detach() for name, parameter in named if parameter.requires_grad}
        local = {f"gathered/{name}": placement for name, placement in self.laid.placements.items()}
        tensors, placements = {**held.tensors, **whole}, {**held.placements, **local}
        return replace(held, tensors=tensors, placements=placements)

    def hash_weights(self) -> str:
        """SHA-256 over the whole weights; all ranks call it together."""
        return hash_held(self.model, self.held(), laid=self.laid, mesh=self.mesh, is_sharded=self.plan.zero > 0)


def look_at(model: nn.Module, data: Splits, config: ParallelConfig) -> Anatomy:
    """What a module is made of, found by running a few samples through it."""
    example = data.train.collate(range(min(2, len(data.train))))
    return find_anatomy(model, tuple(example.inputs), config)


def place_model(
    model: nn.Module,
    data: Splits,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    *,
    plan: Plan,
    train: TrainConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
    world: World,
) -> Placed:
    """Lay a whole model, as one process builds it, out on this rank.

    Raises:
        RequestError: the plan does not fit the model, or settings of ``train`` do not fit the plan.
    """
    check_settings(train, plan)
    precision = Precision.named(train.precision)
    mesh = build_mesh(world, plan)
    anatomy = Anatomy()
    if asks_the_model(plan):
        anatomy = look_at(model, data, parallel)
        plan.check(describe_facts(anatomy, model))
    if not is_known(loss):
        # A loss of the user's own may look at all positions at once.
        anatomy = replace(anatomy, tail_is_pointwise=False)
    model = model.to(device=world.device, dtype=precision.weight_dtype)
    dropout = apply_keyed_dropout(model, train.seed)
    laid = apply_to_model(model, plan=plan, mesh=mesh, anatomy=anatomy, dropout=dropout, batch_norm=train.batch_norm)
    scoring = Scoring(loss, laid=laid, mesh=mesh)
    objective = Objective(model, scoring, precision=precision, device=world.device, dropout=dropout)
    if plan.zero == 0 and mesh.replicas.size == world.size > 1:
        objective.board_passengers()
    wrapped, reduction = apply_to_objective(
        objective,
        plan=plan,
        mesh=mesh,
        anatomy=anatomy,
        laid=laid,
        device=world.device,
        compile_model=train.compile,
        unused_parameters=train.unused_parameters,
    )
    norms = None
    if laid.placements or plan.zero > 0:
        norms = build_norms(
            model,
            mesh=mesh,
            placements=laid.placements,
            updated=reduction.placements,
            is_sharded=plan.zero > 0,
        )
    optimizer = build_optimizer(optim, model, updated=reduction.updated, norms=norms)
    initialise_state(optimizer)
    return Placed(
        plan=plan,
        model=model,
        mesh=mesh,
        anatomy=anatomy,
        laid=laid,
        dropout=dropout,
        objective=objective,
        wrapped=wrapped,
        reduction=reduction,
        norms=norms,
        optimizer=optimizer,
    )


def build_runner(
    placed: Placed, data: Splits, *, train: TrainConfig, optim: OptimConfig, world: World, slot: RankSlot | None
) -> StepRunner:
    """The step over a placed model."""
    return StepRunner(
        model=placed.model,
        objective=placed.wrapped,
        optimizer=placed.optimizer,
        reduction=placed.reduction,
        norms=placed.norms,
        partial=placed.laid.partial,
        mesh=placed.mesh,
        world=world,
        dropout=placed.dropout,
        slot=slot,
        clip=optim.clip,
        num_microbatches=placed.plan.microbatches or 1,
        empty_microbatch=_empty_microbatch(placed, data, train),
        allows_untouched=train.unused_parameters,
    )


def _empty_microbatch(placed: Placed, data: Splits, train: TrainConfig) -> Microbatch | None:
    """What a replica without samples runs where its peers' forward passes wait for it; None where they do not."""
    if not placed.mesh.has(Axis.DATA):
        return None
    items = data.train.collate([0])
    if batchnorm.is_applied(placed.model):
        if train.batch_norm != "sync" and placed.plan.zero < 3:
            return None
        inputs, targets = tuple(tensor[:0] for tensor in items.inputs), items.targets[:0]
        return Microbatch(inputs=inputs, targets=targets, sample_ids=np.empty(0, dtype=np.int64), weight=0.0)
    if placed.plan.zero < 3:
        return None
    # A real sample that counts for nothing: not every module takes a batch of none.
    return Microbatch(inputs=items.inputs, targets=items.targets, sample_ids=np.zeros(1, dtype=np.int64), weight=0.0)
