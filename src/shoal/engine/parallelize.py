"""Puts a model where its plan wants it and binds what a step needs: the one place where plan, mesh, model and optimizer meet."""

from collections.abc import Callable, Sequence
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
from shoal.data.source import Splits
from shoal.engine.config import TrainConfig
from shoal.engine.objective import Objective, Scoring, is_known
from shoal.engine.resolve import asks_the_model, check_settings, schedule_of
from shoal.engine.state import Outline, RankState, draw_outline, export_rank_state, hash_rank_states
from shoal.engine.step import StepRunner
from shoal.models.build import refuse_lazy
from shoal.models.embeddings import make_dense, refuse_rows
from shoal.optim.build import build_optimizer, decide_groups, initialise_state
from shoal.optim.config import OptimConfig
from shoal.optim.precision import Precision
from shoal.parallel import batchnorm
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.config import ParallelConfig
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.apply import ModelLayout, apply_to_model, apply_to_objective
from shoal.parallel.data import Reduction
from shoal.parallel.gradnorm import WholeNorms, build_norms
from shoal.parallel.requirements import describe_facts
from shoal.pipeline.build import Pipeline, Stages, build_pipeline, find_stages
from shoal.pipeline.config import PipelineConfig
from shoal.pipeline.reduction import reduce_stages
from shoal.pipeline.runtime import Runtime
from shoal.randomness.dropout import DropoutKey, apply_keyed_dropout
from shoal.telemetry.statusboard import RankStatus


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A model laid out on this rank, and everything that was made along the way."""

    plan: Plan
    model: nn.Module
    mesh: Mesh
    analysis: ModuleAnalysis
    laid: ModelLayout
    dropout: DropoutKey
    objective: Objective
    wrapped: nn.Module
    reduction: Reduction
    norms: WholeNorms | None
    """How the parts of tensors make whole norms; None where every rank holds them whole."""
    optimizer: torch.optim.Optimizer
    outline: Outline
    """Of the whole model, of which a rank of a pipeline has a part."""
    pipeline: Pipeline | None = None
    runtime: Runtime | None = None
    """What executes the pipeline's schedule."""

    def held(self) -> RankState:
        """What this rank holds of the run's state."""
        return export_rank_state(self.model, self.optimizer, self.reduction, self.laid, self.outline)

    def is_first_keeper(self, name: str) -> bool:
        """True where this rank speaks for a saved tensor among the ranks of its pipeline."""
        return self.pipeline is None or self.pipeline.is_first_keeper(name)

    def watched(self) -> RankState:
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
        return hash_rank_states(
            self.outline,
            self.held(),
            laid=self.laid,
            mesh=self.mesh,
            is_sharded=self.plan.zero > 0,
            is_first_keeper=self.is_first_keeper,
        )


def analyse(model: nn.Module, data: Splits, config: ParallelConfig) -> ModuleAnalysis:
    """What a module is made of, found by running a few samples through it."""
    return analyse_module(model, example_of(data), config)


def parallelize(
    model: nn.Module,
    data: Splits,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    *,
    plan: Plan,
    train: TrainConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
    pipeline: PipelineConfig,
    world: World,
    analysis: ModuleAnalysis | None = None,
    rehearsed: Sequence[torch.Tensor] = (),
) -> ParallelModel:
    """Lay a whole model, as one process builds it, out on this rank.

    Args:
        model: changed in place.
        data: what it will be trained on.
        loss: of its output and the targets.
        plan: derived.
        train: the recipe's section, as ``optim``, ``parallel`` and ``pipeline`` are.
        world: the ranks.
        analysis: what was found in the model, where that is known already.
        rehearsed: inputs of the microbatches to come, in a world without other processes.

    Raises:
        RequestError: the plan does not fit the model, or settings of ``train`` do not fit the plan.
    """
    check_settings(train, plan)
    refuse_lazy(model)
    make_dense(model)
    precision = Precision.named(train.precision)
    mesh = build_mesh(world, plan)
    if analysis is None and asks_the_model(plan):
        analysis = analyse(model, data, parallel)
        plan.check(describe_facts(analysis, model))
    analysis = analysis or ModuleAnalysis()
    stages = _find_stages(model, data, analysis, plan=plan, config=pipeline, train=train, world=world)
    if not is_known(loss):
        # A loss of the user's own may look at all positions at once.
        analysis = replace(analysis, tail_is_pointwise=False)
    model = model.to(device=world.device, dtype=precision.weight_dtype)
    dropout = apply_keyed_dropout(model, train.seed)
    laid = apply_to_model(model, plan=plan, mesh=mesh, analysis=analysis, dropout=dropout, batch_norm=train.batch_norm)
    # Of what is trained: techniques above may have put parameters of their own in the place of the module's.
    refuse_rows(model)
    scoring = Scoring(loss, laid=laid, mesh=mesh)
    objective = Objective(model, scoring, precision=precision, device=world.device, dropout=dropout)
    if plan.zero == 0 and mesh.replicas.size == world.size > 1:
        objective.board_passengers()
    outline, groups = draw_outline(model), decide_groups(optim, model)
    cut = None
    if stages is not None:
        example = tuple(precision.cast_input(tensor.to(world.device)) for tensor in example_of(data))
        with precision.autocast(world.device.type):
            cut = build_pipeline(model, example, stages, mesh=mesh, world=world, dropout=dropout, rehearsed=rehearsed)
    wrapped, reduction, runtime = _reduce(
        objective, cut, plan=plan, mesh=mesh, analysis=analysis, laid=laid, train=train, world=world
    )
    norms = _whole_norms(model, outline, cut, plan=plan, mesh=mesh, laid=laid, reduction=reduction, device=world.device)
    optimizer = build_optimizer(optim, model, updated=reduction.updated, norms=norms, groups=groups)
    initialise_state(optimizer)
    return ParallelModel(
        plan=plan,
        model=model,
        mesh=mesh,
        analysis=analysis,
        laid=laid,
        dropout=dropout,
        objective=objective,
        wrapped=wrapped,
        reduction=reduction,
        norms=norms,
        optimizer=optimizer,
        outline=outline,
        pipeline=cut,
        runtime=runtime,
    )


def _find_stages(
    model: nn.Module,
    data: Splits,
    analysis: ModuleAnalysis,
    *,
    plan: Plan,
    config: PipelineConfig,
    train: TrainConfig,
    world: World,
) -> Stages | None:
    """Where the plan's pipeline cuts the model; None without one."""
    if plan.pp == 1:
        return None
    asked = None if world.is_rehearsed else world
    return resolve_stages(model, data, analysis, plan=plan, config=config, global_batch=train.global_batch, world=asked)


def _whole_norms(
    model: nn.Module,
    outline: Outline,
    cut: Pipeline | None,
    *,
    plan: Plan,
    mesh: Mesh,
    laid: ModelLayout,
    reduction: Reduction,
    device: torch.device,
) -> WholeNorms | None:
    """How the parts of tensors make whole norms; None where every rank holds them whole."""
    # Where stages update by themselves, a norm that waits for the others would stop them all.
    updates_alone = cut is not None and cut.schedule.updates.flows
    if updates_alone or not (laid.placements or plan.zero > 0 or cut is not None):
        return None
    shapes = {entry.parameter: entry.shape for entry in outline.values() if entry.parameter and entry.is_trained}
    return build_norms(
        model,
        mesh=mesh,
        placements=laid.placements,
        updated=reduction.placements,
        is_sharded=plan.zero > 0,
        shapes=shapes,
        entered=None if cut is None else [name for name in shapes if cut.is_first_keeper(name)],
        device=device,
    )


def _reduce(
    objective: Objective,
    cut: Pipeline | None,
    *,
    plan: Plan,
    mesh: Mesh,
    analysis: ModuleAnalysis,
    laid: ModelLayout,
    train: TrainConfig,
    world: World,
) -> tuple[nn.Module, Reduction, Runtime | None]:
    """How gradients are summed, by the objective's wrapper or by the stages; and what runs these."""
    if cut is not None:
        stages = reduce_stages(
            objective.model,
            cut,
            plan=plan,
            mesh=mesh,
            analysis=analysis,
            laid=laid,
            unused_parameters=train.unused_parameters,
        )
        return objective, stages, Runtime(cut.chain, cut.schedule, rank=cut.rank, mail=cut.mail, sums=stages)
    wrapped, reduction = apply_to_objective(
        objective,
        plan=plan,
        mesh=mesh,
        analysis=analysis,
        laid=laid,
        device=world.device,
        compile_model=train.compile,
        unused_parameters=train.unused_parameters,
    )
    return wrapped, reduction, None


def build_runner(
    placed: ParallelModel,
    data: Splits,
    *,
    train: TrainConfig,
    optim: OptimConfig,
    world: World,
    rank_status: RankStatus | None,
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
        rank_status=rank_status,
        clip=optim.clip,
        num_microbatches=placed.plan.microbatches or 1,
        empty_microbatch=_empty_microbatch(placed, data, train),
        allows_untouched=train.unused_parameters,
        runtime=placed.runtime,
    )


def _empty_microbatch(placed: ParallelModel, data: Splits, train: TrainConfig) -> Microbatch | None:
    """What a replica without samples runs where its peers' forward passes wait for it; None where they do not."""
    if not placed.mesh.has(Axis.DATA) and placed.pipeline is None:
        return None
    items = data.train.collate([0])
    if batchnorm.is_applied(placed.model):
        if train.batch_norm != "sync" and placed.plan.zero < 3 and placed.pipeline is None:
            return None
        inputs, targets = tuple(tensor[:0] for tensor in items.inputs), items.targets[:0]
        return Microbatch(inputs=inputs, targets=targets, sample_ids=np.empty(0, dtype=np.int64), weight=0.0)
    if placed.plan.zero < 3 and placed.pipeline is None:
        return None
    # A real sample that counts for nothing: not every module takes a batch of none.
    return Microbatch(inputs=items.inputs, targets=items.targets, sample_ids=np.zeros(1, dtype=np.int64), weight=0.0)


def example_of(data: Splits) -> tuple[torch.Tensor, ...]:
    """Inputs of two samples, for looking at a module; of one where there is no second."""
    return tuple(data.train.collate(range(min(2, len(data.train)))).inputs)


def resolve_stages(
    model: nn.Module,
    data: Splits,
    analysis: ModuleAnalysis,
    *,
    plan: Plan,
    config: PipelineConfig,
    global_batch: int,
    world: World | None = None,
) -> Stages:
    """Where a plan cuts a plain model; the same wherever it is asked.

    Args:
        model: as one process builds it.
        data: what it will be trained on.
        analysis: what was found in it.
        plan: derived, so that its schedule is known.
        config: the recipe's wishes.
        global_batch: samples of a step; a bound on memory is one on the activations of a microbatch of them.
        world: the ranks, which must agree where costs are measured; None for one process that only looks.

    Raises:
        RequestError: it has fewer places to be cut at than the schedule has stages.
    """

    def agree(starts: Sequence[int]) -> Sequence[int]:
        if world is None or world.size == 1:
            return starts
        told = torch.tensor(starts if world.is_first else [0] * len(starts), device=world.device)
        return [int(start) for start in world.all_reduce_(told).tolist()]

    return find_stages(
        model,
        example_of(data),
        analysis,
        schedule=schedule_of(plan),
        config=config,
        agree=agree,
        samples=max(1, global_batch // (plan.num_shares * (plan.microbatches or 1))),
    )
