"""Lays a model out as its plan wants it: the one place where plan, mesh, model and optimizer meet."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.comm.global_batch import replicas_of
from shoal.comm.mesh import Mesh, build_mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.compressrule import CompressRule
from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.data.batchform import ModelInputs
from shoal.data.source import Splits
from shoal.engine.async_pipeline import AsyncPipeline
from shoal.engine.batches.empty import Filler
from shoal.engine.batches.schedule import most_microbatches
from shoal.engine.compression.saved import SavedSums
from shoal.engine.compression.settings import check_compression
from shoal.engine.config import Settings
from shoal.engine.hooks import Hook, Hooks
from shoal.engine.islands.build import build_islands
from shoal.engine.model import ParallelModel
from shoal.engine.objective import Objective, Scoring, StepFunction, is_known, refuse_own_loss, refuse_step, settle_loss
from shoal.engine.passes import Passes
from shoal.engine.piggyback import StepScalars
from shoal.engine.resolve import asks_the_model, check_settings, schedule_of
from shoal.engine.state import Outline, draw_outline
from shoal.engine.stop import StopRequest
from shoal.engine.weights import remember
from shoal.models.build import refuse_lazy
from shoal.models.embeddings import make_dense, refuse_rows
from shoal.models.losses import Loss, loss_of_output
from shoal.optim.build import build_optimizer, decide_groups, freeze, initialise_state
from shoal.optim.given import GivenOptimizer
from shoal.optim.groups import Groups
from shoal.optim.precision import Precision
from shoal.parallel import batchnorm
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig
from shoal.parallel.apply import ModelLayout, apply_to_model, apply_to_objective
from shoal.parallel.compressed import Compressing
from shoal.parallel.data import Reduction
from shoal.parallel.gradnorm import WholeNorms, build_norms
from shoal.parallel.onebit import MomentumSums
from shoal.parallel.requirements import describe_facts
from shoal.pipeline.build import Pipeline, Stages, build_pipeline, find_stages
from shoal.pipeline.reduction import reduce_stages
from shoal.pipeline.runtime import Runtime
from shoal.randomness.dropout import DropoutKey, apply_keyed_dropout
from shoal.telemetry.stepclock import StepClock


def analyse(model: nn.Module, data: Splits, config: ParallelConfig) -> ModuleAnalysis:
    """What a module is made of, found by running a few samples through it."""
    return analyse_module(model, example_of(data), config)


def parallelize(
    model: nn.Module,
    data: Splits,
    loss: Loss | StepFunction | None,
    *,
    plan: Plan,
    settings: Settings,
    world: World,
    analysis: ModuleAnalysis | None = None,
    rehearsed: Sequence[torch.Tensor] = (),
    clock: StepClock | None = None,
    hooks: Iterable[Hook] = (),
    stop: StopRequest | None = None,
    optimizer: Optimizer | Callable[[nn.Module], Optimizer] | None = None,
) -> ParallelModel:
    """Lay a whole model, as one process builds it, out on this rank: analyse it, apply the plan's techniques, cut it, wrap it.

    Args:
        model: changed in place.
        data: what it will be trained on.
        loss: of its output and the targets, or the user's own step; None for what the targets say, or the model's own.
        plan: resolved.
        settings: the recipe's sections that decide what it computes.
        world: the ranks.
        analysis: what was found in the model, where that is known already.
        rehearsed: inputs of the microbatches to come, in a world without other processes.
        clock: hears what this rank does, and tells the supervisor.
        hooks: called at fixed points of training.
        stop: this rank's request to stop, where there was one before there was a model.
        optimizer: the script's own, over the parameters of ``model``, or a function of the model that makes one. It stays the
            same object: its groups get this rank's tensors, and its step brings weights to where forward passes read them. Left
            out, ``settings.optim`` says which is built.

    Raises:
        RequestError: the plan does not fit the model, or settings do not fit the plan.
    """
    train = settings.train
    check_all_settings(settings, plan)
    loss = _settle_loss(loss, model, data, plan)
    refuse_lazy(model)
    given = None if optimizer is None else _given_optimizer(optimizer, model, plan)
    make_dense(model)
    freeze(model, settings.optim)
    precision = Precision.named(train.precision)
    mesh = build_mesh(world, plan)
    if analysis is None and asks_the_model(plan):
        analysis = analyse(model, data, settings.parallel)
        plan.check(describe_facts(analysis, model))
    analysis = analysis or ModuleAnalysis()
    stages = _find_stages(model, data, analysis, plan=plan, settings=settings, world=world)
    if not is_known(loss):
        # A loss of the user's own may look at all positions at once.
        analysis = replace(analysis, tail_is_pointwise=False)
    model = model.to(device=world.device, dtype=precision.weight_dtype)
    dropout = apply_keyed_dropout(model, train.seed)
    layout = apply_to_model(
        model, plan=plan, mesh=mesh, analysis=analysis, dropout=dropout, batch_norm=train.batch_norm
    )
    # Of what is trained: techniques above may have put parameters of their own in the place of the module's.
    refuse_rows(model)
    scalars = StepScalars(stop or StopRequest(), mesh=mesh, dtype=precision.weight_dtype, device=world.device)
    scoring = Scoring(loss, layout=layout, mesh=mesh)
    objective = Objective(model, scoring, precision=precision, device=world.device, dropout=dropout, scalars=scalars)
    objective.name_sample = getattr(data.train, "name_sample", None)
    compressing = _compressing(settings, plan, world)
    if plan.zero == 0 and compressing is None and mesh.has_whole_replicas:
        scalars.piggyback_on(objective)
    outline, groups = draw_outline(model), decide_groups(settings.optim, model)
    cut = None
    if stages is not None:
        example = example_of(data).map(lambda tensor: precision.cast_input(tensor.to(world.device)))
        with precision.autocast(world.device.type):
            cut = build_pipeline(model, example, stages, mesh=mesh, world=world, dropout=dropout, rehearsed=rehearsed)
    parts = _Parts(plan=plan, world=world, mesh=mesh, analysis=analysis, layout=layout, objective=objective, cut=cut)
    passes = _build_passes(
        parts, data, dropout=dropout, settings=settings, clock=clock, hooks=Hooks(hooks), compressing=compressing
    )
    norms = _whole_norms(parts, outline, passes.reduction)
    held = _make_optimizer(given, settings, model, passes.reduction, norms=norms, groups=groups)
    return _assemble(parts, passes, outline, norms=norms, optimizer=held, settings=settings, is_given=given is not None)


def check_all_settings(settings: Settings, plan: Plan) -> None:
    """Refuse settings that this plan cannot carry out.

    Raises:
        RequestError: lists them with their fixes.
    """
    check_settings(settings.train, plan)
    check_compression(settings, plan)


def _make_optimizer(
    given: GivenOptimizer | None,
    settings: Settings,
    model: nn.Module,
    reduction: Reduction,
    *,
    norms: WholeNorms | None,
    groups: Groups,
) -> Optimizer:
    """The optimizer of this rank's tensors, with its state: as the settings say, or the script's own."""
    if given is None:
        made = build_optimizer(settings.optim, model, updated=reduction.updated, norms=norms, groups=groups)
    else:
        made = given.adopt(reduction.updated)
    initialise_state(made)
    if reduction.exchange is not None:
        # Every way to take a step comes by here, a script's own too; one that is not taken does not.
        sums = reduction.exchange.sums
        made.register_step_post_hook(lambda *_: sums.commit())
    if isinstance(reduction.exchange, MomentumSums):
        reduction.exchange.attach(made, reduction.updated)
    return made


def _given_optimizer(
    optimizer: Optimizer | Callable[[nn.Module], Optimizer], model: nn.Module, plan: Plan
) -> GivenOptimizer:
    """The script's own optimizer, checked, with the names of its parameters.

    Raises:
        RequestError: it cannot be used, or not under this plan.
    """
    if plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        raise RequestError(
            f"plan {str(plan)!r}: the stages of schedule={plan.schedule} update by themselves, and an optimizer object is "
            "stepped by its script; use schedule=1f1b, or a recipe with [optim]"
        )
    if plan.compress is not None and CompressRule.parse(plan.compress).kind == "onebit":
        raise RequestError(
            f"plan {str(plan)!r}: compress={plan.compress} takes the optimizer over, and this one is the script's own; use a "
            "recipe with [optim], or compress=int8"
        )
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model)
    return GivenOptimizer(made, model)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a model is laid out by."""

    plan: Plan
    world: World
    mesh: Mesh
    analysis: ModuleAnalysis
    layout: ModelLayout
    objective: Objective
    cut: Pipeline | None


def _settle_loss(loss: Loss | StepFunction | None, model: nn.Module, data: Splits, plan: Plan) -> Loss | StepFunction:
    """The loss that is meant, with the data told which labels it counts.

    Raises:
        RequestError: the plan cannot follow it; says why, and which plan can.
    """
    found = settle_loss(loss, model, data)
    if isinstance(found, StepFunction):
        refuse_step(plan)
    if found is loss_of_output and plan.cp > 1:
        refuse_own_loss(plan)
    return found


def _find_stages(
    model: nn.Module, data: Splits, analysis: ModuleAnalysis, *, plan: Plan, settings: Settings, world: World
) -> Stages | None:
    """Where the plan's pipeline cuts the model; None without one."""
    if plan.pp == 1:
        return None
    asked = None if world.is_rehearsed else world
    return resolve_stages(model, data, analysis, plan=plan, settings=settings, world=asked)


def _build_passes(
    parts: _Parts,
    data: Splits,
    *,
    dropout: DropoutKey,
    settings: Settings,
    clock: StepClock | None,
    hooks: Hooks,
    compressing: Compressing | None,
) -> Passes:
    """What runs microbatches: gradients are summed by the objective's data-parallel wrapper, or by the pipeline's stages."""
    objective, cut, train = parts.objective, parts.cut, settings.train
    gathering = settings.compression if settings.compression.weights != "none" else None
    wrapped: nn.Module = objective
    reduction: Reduction
    runtime = None
    if cut is None:
        wrapped, reduction = apply_to_objective(
            objective,
            plan=replace(parts.plan, microbatches=most_microbatches(train, parts.plan)),
            mesh=parts.mesh,
            analysis=parts.analysis,
            layout=parts.layout,
            device=parts.world.device,
            compile_model=train.compile,
            unused_parameters=train.unused_parameters,
            compressing=compressing,
            gathering=gathering,
        )
    else:
        stages = reduce_stages(
            objective.model,
            cut,
            plan=parts.plan,
            mesh=parts.mesh,
            analysis=parts.analysis,
            layout=parts.layout,
            unused_parameters=train.unused_parameters,
            compressing=compressing,
            gathering=gathering,
        )
        runtime = Runtime(cut.chain, cut.schedule, rank=cut.rank, p2p=cut.p2p, sums=stages)
        reduction = stages
    return Passes(
        objective=objective,
        wrapped=wrapped,
        reduction=reduction,
        dropout=dropout,
        filler=Filler.build(
            objective.model,
            data.train,
            plan=parts.plan,
            mesh=parts.mesh,
            is_pipeline=cut is not None,
            batch_norm=train.batch_norm,
        ),
        runtime=runtime,
        mesh=parts.mesh,
        hooks=hooks,
        has_batch_norm=batchnorm.is_applied(objective.model),
        replicas=replicas_of(parts.plan, parts.mesh.channel(Axis.DATA)),
        clock=clock,
        schedule_for=None if cut is None else lambda count: schedule_of(replace(parts.plan, microbatches=count)),
    )


def _compressing(settings: Settings, plan: Plan, world: World) -> Compressing | None:
    """How gradients are compressed inside an island: not at all where there are several, which compress what they exchange."""
    if plan.compress is None or plan.islands > 1:
        return None
    return Compressing(
        rule=CompressRule.parse(plan.compress),
        config=settings.compression,
        seed=settings.train.seed,
        device=world.device,
        clip=settings.optim.clip,
        allows_untouched=settings.train.unused_parameters,
        form=MomentumSums if CompressRule.parse(plan.compress).kind == "onebit" else None,
    )


def _whole_norms(parts: _Parts, outline: Outline, reduction: Reduction) -> WholeNorms | None:
    """How the parts of tensors make whole norms; None where every rank holds them whole."""
    plan, placements, cut = parts.plan, parts.layout.placements, parts.cut
    # Where stages update by themselves, a norm that waits for the others would stop them all.
    updates_alone = cut is not None and cut.schedule.updates.are_asynchronous
    if updates_alone or not (placements or plan.zero > 0 or cut is not None):
        return None
    shapes = {entry.parameter: entry.shape for entry in outline.values() if entry.parameter and entry.is_trained}
    return build_norms(
        parts.objective.model,
        mesh=parts.mesh,
        placements=placements,
        updated=reduction.placements,
        is_sharded=plan.zero > 0,
        shapes=shapes,
        entered=None if cut is None else [name for name in shapes if cut.is_first_owner(name)],
        device=parts.world.device,
    )


def _assemble(
    parts: _Parts,
    passes: Passes,
    outline: Outline,
    *,
    norms: WholeNorms | None,
    optimizer: Optimizer,
    settings: Settings,
    is_given: bool,
) -> ParallelModel:
    scalars = parts.objective.scalars
    assert scalars is not None, "parallelize gives the objective its scalars"
    max_norm, cut, exchange = settings.optim.clip, parts.cut, passes.reduction.exchange
    saved_names = {entry.parameter: name for name, entry in outline.items() if entry.parameter and entry.is_trained}
    asynchronous = None
    if cut is not None and cut.schedule.updates.are_asynchronous:
        asynchronous = AsyncPipeline(passes, cut, parts.plan, optimizer=optimizer, max_norm=max_norm, stop=scalars.stop)
    assembled = ParallelModel(
        plan=parts.plan,
        model=parts.objective.model,
        world=parts.world,
        mesh=parts.mesh,
        analysis=parts.analysis,
        layout=parts.layout,
        objective=parts.objective,
        reduction=passes.reduction,
        optimizer=optimizer,
        norms=norms,
        outline=outline,
        pipeline=cut,
        passes=passes,
        scalars=scalars,
        max_norm=max_norm,
        allows_unused=settings.train.unused_parameters,
        asynchronous=asynchronous,
        islands=build_islands(
            passes.reduction,
            optimizer,
            parts.objective.model,
            plan=parts.plan,
            world=parts.world,
            mesh=parts.mesh,
            saved_names=saved_names,
            settings=settings,
            stop=scalars.stop,
        )
        if parts.mesh.has(Axis.ISLAND)
        else None,
        publishes_by_itself=is_given,
        saved_sums=None if exchange is None else SavedSums(sums=exchange.sums, saved_names=saved_names),
        needs_exact_norm=settings.optim.adapt == "adascale" or settings.train.batch_schedule == "noise",
    )
    if is_given:
        if (islands := assembled.islands) is not None:
            optimizer.register_step_pre_hook(lambda *_: islands.before_update())
        optimizer.register_step_post_hook(lambda *_: assembled.stepped_by_script())
    remember(assembled)
    for hook in assembled.hooks:
        hook.on_attach(assembled)
        if assembled.islands is not None and hook.tensors():
            raise RequestError(
                f"plan {str(parts.plan)!r}: the callback {hook.name or type(hook).__name__} keeps tensors of its own beside the "
                f"weights, which differ from island to island; leave it out, or leave sync out"
            )
    return assembled


def example_of(data: Splits) -> ModelInputs:
    """Inputs of two samples, for looking at a module; of one where there is no second."""
    return data.train.collate(range(min(2, len(data.train)))).model_inputs


def resolve_stages(
    model: nn.Module,
    data: Splits,
    analysis: ModuleAnalysis,
    *,
    plan: Plan,
    settings: Settings,
    world: World | None = None,
) -> Stages:
    """Where a plan cuts a plain model; the same wherever it is asked.

    Args:
        model: as one process builds it.
        data: what it will be trained on.
        analysis: what was found in it.
        plan: resolved, so that its schedule is known.
        settings: of the recipe. A bound on memory is one on the activations of a microbatch of ``train.global_batch``.
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
        config=settings.pipeline,
        agree=agree,
        samples=max(1, settings.train.global_batch // (plan.num_shares * (plan.microbatches or 1))),
    )
