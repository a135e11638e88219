"""From a recipe to the parts of a run. The only file that sees every section; each part gets its own and no more."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.pretrained import Selection, load_module
from shoal.checkpoint.reader import read
from shoal.checkpoint.whole import newest_whole
from shoal.comm.world import World
from shoal.core.config import read_toml, validate
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.data.batchform import ModelInputs
from shoal.data.build import build_splits
from shoal.data.fitted import with_fitted
from shoal.data.source import Splits
from shoal.data.spec import DataSpec
from shoal.engine.callbacks.build import build_callbacks
from shoal.engine.hooks import Hook
from shoal.engine.model import ParallelModel
from shoal.engine.objective import Objective, Scoring, settle_loss
from shoal.engine.parallelize import example_of
from shoal.engine.resolve import RunSetup
from shoal.engine.state import import_weights, seed_for_build
from shoal.engine.stop import StopRequest
from shoal.engine.weights import load_parallel
from shoal.models.build import build_model
from shoal.models.config import AnyModelConfig, InitConfig
from shoal.models.losses import Loss, build_loss
from shoal.optim.build import freeze
from shoal.optim.precision import Precision
from shoal.telemetry.statusboard import RankStatus
from shoal.telemetry.summaryfile import read_summary
from shoal.trainer.admission.model import agree_on_model
from shoal.trainer.claim import check_inside
from shoal.trainer.config import Recipe
from shoal.trainer.loop import Trainer
from shoal.trainer.online.config import NEVER
from shoal.trainer.online.publisher import Publisher, describe_inputs
from shoal.trainer.online.watch import DriftWatch


def build_parts(
    recipe: Recipe, *, data: Splits | None = None, model: nn.Module | None = None, loads: bool = True
) -> tuple[nn.Module, Loss, Splits]:
    """Model, loss and data, the same on every rank: initial weights are what one process builds under the seed.

    Args:
        recipe: names them.
        data: where they are built already.
        model: where it is built already, by ``build_seeded``.
        loads: fill the model with the weights of ``model.init``; False where that is done later, by slices, or never.
    """
    data = data or build_splits(recipe.data, recipe.train.seed)
    if model is None:
        model = build_seeded(recipe, data.spec)
    if loads and recipe.model.init is not None:
        load_module(model, Path(recipe.model.init.path), selection_of(recipe.model.init))
    loss = build_loss(recipe.model, data.spec)
    settle_loss(loss, model, data)
    return model, loss, data


def build_seeded(recipe: Recipe, spec: DataSpec) -> nn.Module:
    """The model that a recipe names, with its first weights, as one process builds it under the seed."""
    seed_for_build(recipe.train.seed)
    model = build_model(recipe.model, spec)
    freeze(model, recipe.optim)
    return model


def selection_of(init: InitConfig) -> Selection:
    """Which weights ``model.init`` asks for."""
    return Selection(strict=init.strict, prefix=init.prefix, rename=dict(init.rename), only=init.only, skip=init.skip)


def load_init(model: ParallelModel, recipe: Recipe) -> None:
    """Fill a laid out model with the weights of ``model.init``, if the recipe has it: each rank reads its own part."""
    init = recipe.model.init
    if init is not None:
        load_parallel(model, init.path, selection_of(init))


def build_without_memory(config: AnyModelConfig, spec: DataSpec) -> nn.Module:
    """The model on torch's meta device, where it allows that: shapes, and no weights.

    Raises:
        RequestError: it cannot be built.
    """
    try:
        with torch.device("meta"):
            return build_model(config, spec)
    except RequestError as refusal:
        if refusal.__cause__ is None:
            raise
    except (NotImplementedError, RuntimeError):
        pass
    # The user's own build may compute on its weights, which the meta device cannot, and says so by many kinds of errors.
    return build_model(config, spec)


def build_trainer(
    recipe: Recipe,
    *,
    setup: RunSetup | None = None,
    run_dir: Path,
    resume: bool,
    world: World,
    rank_status: RankStatus | None,
    stop: StopRequest | None = None,
    take_model: Callable[[DataSpec], nn.Module | None] = lambda _: None,
    data: Splits | None = None,
    recovers: bool = False,
    hooks: Sequence[Hook] | None = None,
) -> Trainer:
    """The trainer that a recipe describes, on this rank; ``take_model`` gives a model that is built already.

    With ``recovers`` it has no state to go on from yet: whoever builds it gives it one. ``hooks`` are the recipe's callbacks,
    where they are built already.
    """
    data = data or build_splits(recipe.data, recipe.train.seed)
    model, loss, data = build_parts(recipe, data=data, model=take_model(data.spec), loads=False)
    agree_on_model(world, model)
    hooks = list(build_callbacks(recipe.callbacks) if hooks is None else hooks)
    taken = describe_inputs(model, example_of(data), data.spec) if recipe.publish.is_on else ((), False)
    watch = DriftWatch(recipe.publish.window, RunDir(run_dir).published if world.is_first else None)
    trainer = Trainer(
        model,
        data,
        loss=loss,
        train=recipe.train,
        optim=recipe.optim,
        evaluation=recipe.eval,
        checkpoint=recipe.checkpoint,
        telemetry=recipe.telemetry,
        elastic=recipe.elastic,
        parallel=recipe.parallel,
        pipeline=recipe.pipeline,
        replicas=recipe.replicas,
        compression=recipe.compression,
        setup=setup,
        run_dir=run_dir,
        resume=resume,
        prefetch=recipe.data.prefetch,
        workers=recipe.data.workers,
        rank_status=rank_status,
        world=world,
        was_tried=True,
        recovers=recovers,
        hooks=[*hooks, *([watch] if recipe.publish.is_on else [])],
        log=recipe.log,
        stop=stop,
    )
    # A run that goes on has the weights of its checkpoint.
    if trainer.progress.step == 0 and not recovers:
        load_init(trainer.engine, recipe)
    if trainer.total_steps >= NEVER:
        trainer.reporter.total_steps = 0  # The display has no end to count down to.
    if recipe.publish.is_on:
        trainer.publisher = Publisher(
            recipe.publish,
            run_dir=run_dir,
            engine=trainer.engine,
            world=trainer.world,
            data=data,
            taken=taken,
            batch=recipe.eval.batch or trainer.setup.micro_batch,
            reporter=trainer.reporter,
            watch=watch,
        )
    return trainer


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A finished or interrupted run, ready to be asked questions: its model with the newest whole weights, in eval mode."""

    recipe: Recipe
    """As it was resolved for the run."""
    model: nn.Module
    """With the weights, on the CPU, in evaluation mode."""
    loss: Loss
    """Of its output and the targets."""
    data: Splits
    """All splits."""
    step: int
    """Steps that the weights have been trained for."""
    checkpoint: Path
    """Where the weights are from."""
    run_dir: Path
    """Of the run."""

    @property
    def plan(self) -> Plan:
        """The plan that the run was last started under."""
        return Plan.parse(self.recipe.plan)

    @property
    def summary(self) -> dict[str, Any] | None:
        """What ``summary.json`` says: status, steps, losses, pace; None for a run that has none yet."""
        return read_summary(self.run_dir)

    @property
    def objective(self) -> Objective:
        """Model and loss in the run's precision, on the CPU."""
        precision = Precision.named(self.recipe.train.precision)
        return Objective(self.model, Scoring(self.loss), precision=precision, device=torch.device("cpu"))

    @property
    def example_inputs(self) -> ModelInputs:
        """Inputs of two samples, for tracing; of one where there is no second."""
        precision = Precision.named(self.recipe.train.precision)
        return example_of(self.data).map(precision.cast_input)


def load_run(run_dir: str | PathLike[str]) -> LoadedRun:
    """The run in a directory, with the weights of its newest whole checkpoint.

    The model is built as the recipe says, whatever plan trained it, on the CPU and in evaluation mode; nothing of the checkpoint
    is run.

    Args:
        run_dir: the run directory.

    Returns:
        The run: ``run.model``, ``run.recipe``, ``run.data``, ``run.step``, ``run.plan``, ``run.summary``.

    Raises:
        RequestError: this is not a run directory.
        RunError: it has no whole checkpoint; each refused one is named.
    """
    run = RunDir(Path(run_dir))
    if not run.recipe.exists() and run.checkpoints.exists():
        raise RequestError(
            f"{run_dir} is the run directory of a script, which has no recipe.toml to build the model from; build it yourself "
            f"and call shoal.load_weights(model, {str(run_dir)!r})"
        )
    if not run.recipe.exists():
        raise RequestError(f"{run_dir} is not a run directory: it has no recipe.toml")
    check_inside(run)
    recipe = validate(Recipe, read_toml(run.recipe), origin=str(run.recipe))
    recipe = recipe.model_copy(update={"data": with_fitted(recipe.data, run.root)})
    found = newest_whole(run.checkpoints)
    if found.path is None:
        refused = "; ".join(f"{path.name}: {reason}" for path, reason in found.refused)
        address = recipe.checkpoint.address
        fix = f"; its checkpoints are at {address}: bring one with `shoal ckpt fetch {run_dir}`" if address else ""
        raise RunError(f"{run_dir} has no whole checkpoint to load ({refused or 'none was written'}){fix}")
    for path, reason in found.refused:
        print(f"warning: checkpoint {path.name} is not whole and is passed over: {reason}", file=sys.stderr)
    model, loss, data = build_parts(recipe, loads=False)
    checkpoint = read(found.path)
    model = model.to(dtype=Precision.named(recipe.train.precision).weight_dtype)
    import_weights(model, checkpoint.tensors, origin=str(found.path))
    model.eval()
    return LoadedRun(
        recipe=recipe, model=model, loss=loss, data=data, step=checkpoint.step, checkpoint=found.path, run_dir=run.root
    )
