"""One rank of a plan, rehearsed: built as on its place in the plan, with steps taken without peers, measured.

Nothing of the run is imitated. The model, the techniques, the reduction, the schedule's cells and the optimizer are those of a
run; only the channels echo (``comm/rehearsal.py``). The traffic that the rank has counted and the bytes that it then holds are
those of the run, and its passes take as long as they take on this machine.

The forecast of a rank's traffic is exact: its last step is like all that follow, from the second on, when DDP has cut its buckets
by the order in which gradients came. A step with a short batch, at the end of an epoch, moves less. Asynchronous
schedules and parameter servers cannot be rehearsed.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.comm.trafficcounter import TrafficCounts, plain_traffic
from shoal.comm.world import World
from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.data.batchform import ModelInputs
from shoal.data.loading.loader import Loader, StepBatch
from shoal.data.source import Splits
from shoal.engine.hooks import Hook
from shoal.engine.model import ParallelModel
from shoal.engine.parallelize import analyse, parallelize, resolve_stages
from shoal.engine.resolve import asks_the_model, resolve_plan
from shoal.engine.sizes import measure_state
from shoal.models.losses import Loss
from shoal.optim.precision import Precision
from shoal.optim.rates import rate
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.pipeline.build import Stages
from shoal.schedules.schedule import Action
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe

_STEPS = 1000
"""Of the run that the rehearsed steps are taken to begin; it decides their learning rate and nothing else."""


@dataclass(frozen=True)
class Subject:
    """What is rehearsed, built once for many plans and ranks."""

    recipe: Recipe
    model: nn.Module
    """As one process builds it; every rehearsal changes a copy."""
    loss: Loss
    data: Splits
    _analysis: list[ModuleAnalysis] = field(default_factory=list)

    @property
    def analysis(self) -> ModuleAnalysis:
        """What was found in the model; looked for once."""
        if not self._analysis:
            self._analysis.append(analyse(copy.deepcopy(self.model), self.data, self.recipe.parallel))
        return self._analysis[0]

    def stages(self, plan: Plan) -> Stages:
        """Where a derived plan cuts the model."""
        return resolve_stages(
            copy.deepcopy(self.model),
            self.data,
            self.analysis,
            plan=plan,
            settings=self.recipe.settings,
        )


def build_subject(recipe: Recipe) -> Subject:
    """Model, loss and data of a recipe."""
    model, loss, data = build_parts(recipe)
    return Subject(recipe, model, loss, data)


@dataclass(frozen=True, kw_only=True)
class CellTime:
    """What one action of a pipeline took."""

    action: Action
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One step of one rank."""

    traffic: TrafficCounts
    """Calls and bytes by axis and operation."""
    seconds: float
    """From its first microbatch to the end of its update, without loading data or what a rehearsal's channels do."""
    cells: tuple[CellTime, ...] = ()
    """With a pipeline: its cells, in their order."""

    @property
    def cell_seconds(self) -> float:
        """All cells together."""
        return sum(cell.seconds for cell in self.cells)


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """Some steps of one rank, and what it holds after them."""

    steps: tuple[StepTrace, ...]
    state: Mapping[str, int]
    """Bytes of weights, gradients and optimizer state."""

    @property
    def traffic(self) -> TrafficCounts:
        """Of the last step, which every later one is like."""
        return plain_traffic(self.steps[-1].traffic)


def trace_rank(
    subject: Subject,
    plan: Plan,
    *,
    world: World,
    num_steps: int = 2,
    go_on: Callable[[int], bool] | None = None,
) -> RankTrace:
    """Lay a rank out and take steps on it: rehearsed or, where the world has its processes, for real.

    Two steps at least, to see one that is like all that follow: DDP cuts its buckets anew after the first.

    Args:
        subject: model, loss and data.
        plan: derived.
        world: this rank among the others.
        num_steps: how many steps.
        go_on: asked before every step, by its number, whether to take it; with it, ``num_steps`` is how many batches there are.

    Raises:
        RequestError: the plan is asynchronous, whose steps have no end of their own, or does not fit the model.
    """
    if plan.ps or (plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous):
        raise RequestError(f"plan {str(plan)!r} is not synchronous, and only the steps of those can be rehearsed")
    recipe = subject.recipe
    plan = resolve_plan(recipe.train, plan).plan
    batches = _batches(subject, plan, world.rank, num_steps)
    model = _parallelize(subject, plan, world, batches[0])
    try:
        timer = _CellTimer(model.mesh)
        model.add_hook(timer)
        model.objective.train()
        go_on = go_on or (lambda number: number < num_steps)
        steps: list[StepTrace] = []
        while go_on(len(steps)):
            steps.append(_step(subject, model, timer, batches[len(steps) % num_steps], len(steps)))
        return RankTrace(steps=tuple(steps), state=measure_state(model))
    finally:
        model.close()


def _parallelize(subject: Subject, plan: Plan, world: World, batch: StepBatch) -> ParallelModel:
    recipe, precision = subject.recipe, Precision.named(subject.recipe.train.precision)
    pipeline = recipe.pipeline
    if plan.pp > 1 and world.is_rehearsed and pipeline.balance == "measured" and not pipeline.stages:
        # What is measured differs from time to time, and all ranks of one rehearsal must be cut alike.
        recipe = replace_stages(recipe, subject.stages(plan))
    inputs = batch.microbatches[0].model_inputs if batch.microbatches else ModelInputs(())
    return parallelize(
        copy.deepcopy(subject.model),
        subject.data,
        subject.loss,
        plan=plan,
        settings=recipe.settings,
        world=world,
        analysis=subject.analysis if asks_the_model(plan) else None,
        rehearsed=inputs.map(precision.cast_input),
    )


def replace_stages(recipe: Recipe, stages: Stages) -> Recipe:
    """The recipe with its stages said by name."""
    named = [stages.units[start].path for start in stages.starts[1:]]
    return recipe.model_copy(update={"pipeline": recipe.pipeline.model_copy(update={"stages": named})})


def _batches(subject: Subject, plan: Plan, rank: int, num_steps: int) -> Sequence[StepBatch]:
    train, share = subject.recipe.train, plan.dp or 1
    replica = rank // (plan.cp * plan.tp) % share
    loader = Loader(
        subject.data.train,
        global_batch=train.global_batch,
        micro_batch=train.global_batch // share // (plan.microbatches or 1),
        replica=replica,
        num_replicas=share,
        seed=train.seed,
        prefetch=0,
    )
    try:
        return [loader.next() for _ in range(num_steps)]
    finally:
        loader.close()


class _CellTimer(Hook):
    """Times the cells of a pipeline's schedule, without what a rehearsal's channels spend on pretending.

    That is not a rank's work: what channels take with peers is priced by itself.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._echoed = 0.0
        self.cells: list[CellTime] = []

    def on_step_start(self, step: int, batch: StepBatch) -> None:
        """Forget the last step's."""
        self.cells, self._echoed = [], self._mesh.echo_seconds

    def on_action(self, action: Action, begin: float, waited: float, end: float) -> None:
        """Note a cell."""
        spent = self._mesh.echo_seconds
        seconds = max(0.0, end - begin - waited - (spent - self._echoed))
        self.cells.append(CellTime(action=action, seconds=seconds))
        self._echoed = spent


def _step(subject: Subject, model: ParallelModel, timer: _CellTimer, batch: StepBatch, number: int) -> StepTrace:
    mesh, echoed = model.mesh, model.mesh.echo_seconds
    with mesh.traffic.counting() as counts:
        started = time.perf_counter()
        model.train_step(
            batch,
            step=number,
            lr=rate(subject.recipe.optim, number, _STEPS),
            loss_scale=model.precision.first_loss_scale,
        )
        seconds = time.perf_counter() - started - (mesh.echo_seconds - echoed)
    return StepTrace(traffic=dict(counts), seconds=seconds, cells=tuple(timer.cells))
