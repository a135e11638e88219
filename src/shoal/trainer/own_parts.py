"""The user's own data, model and loss, built and run before any process starts: what does not fit is said once, by name.

The request cannot know it without torch, so its caller brings ``OwnPartsHere``. A model is built for every question and thrown
away; the shipped models and data are checked by numbers, and not here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.pretrained import match, open_weights, wanted_of
from shoal.comm.global_batch import ALONE, Replicas, gathering, why_not_joined
from shoal.core.errors import RequestError, ShoalError
from shoal.core.functions import call_own
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.data.batchform import ModelInputs, arguments_of, call_model, targets_of
from shoal.data.build import build_splits
from shoal.data.check import DataSummary
from shoal.data.config import AnyDataConfig
from shoal.data.loading.loader import Microbatch
from shoal.data.loading.parts import build_order, options_of
from shoal.data.order import Ids, Position, own_microbatches
from shoal.data.source import Source, Splits, Streamed
from shoal.data.spec import DataSpec
from shoal.engine.callback_config import is_own
from shoal.engine.callbacks.build import build_callbacks
from shoal.engine.meancheck import find_other_mean
from shoal.engine.metrics import GatheredMetric, build_metrics, try_metric
from shoal.engine.objective import Objective, Scoring
from shoal.engine.parallelize import analyse, example_of, resolve_stages
from shoal.models.embeddings import make_dense
from shoal.optim.build import freeze
from shoal.optim.precision import Precision
from shoal.optim.torchclass import check_named
from shoal.parallel.batchnorm import apply_batchnorm
from shoal.parallel.requirements import describe_facts
from shoal.pipeline.build import prove_stages
from shoal.replicas.fragments import check_fragments
from shoal.telemetry.memory import is_out_of_memory
from shoal.trainer.build import build_parts, build_without_memory, selection_of
from shoal.trainer.config import Recipe
from shoal.trainer.samedata import refuse_other_data_early

_TRIED = 8
"""Held-out samples that metrics are tried on."""
_NEVER_WORKS = (TypeError, AttributeError, NameError, ImportError)
"""What a metric raises that cannot work, however many samples there are."""
_FEW = 2
"""Samples that are enough to see whether layers fit: a whole microbatch may need the memory that the plan saves."""

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Of the environment of a rank, and of nobody before it."""


def try_first_samples(recipe: Recipe, plan: Plan, model: nn.Module, loss: Any, data: Splits) -> None:
    """Run the first samples of the first step through the model and its loss.

    Args:
        recipe: as it will run.
        plan: resolved.
        model: built for this, and not used after it.
        loss: of its output and the targets.
        data: what it will be trained on.

    Raises:
        RequestError: they do not fit one another; says which layer failed, and on what.
    """
    first, *others = _microbatches(data.train, recipe.train.global_batch, recipe.train.seed, plan)
    # As the run has it: a raw one refuses one sample, the run's does not.
    apply_batchnorm(model, group=None, mode=recipe.train.batch_norm)
    try:
        whole = _load(data, first)
        objective = Objective(
            model.to(dtype=Precision.named(recipe.train.precision).weight_dtype),
            Scoring(loss),
            precision=Precision.named(recipe.train.precision),
            device=torch.device("cpu"),
        )
        objective.name_sample = getattr(data.train, "name_sample", None)
        model.train()
        joined = Replicas(refusal=why_not_joined(plan))
        try:
            _run(objective, _load(data, first[:_FEW]), joined)
        except ShoalError:
            # Perhaps the module takes batches of one size only; it must at least take the one that it will get.
            if len(first) <= _FEW:
                raise
            _run(objective, whole, joined)
        # Few samples may have nothing to learn from, such as no triplet; a whole step must.
        for ids in (first, *others):
            if objective.why_constant is None:
                break
            _run(objective, _load(data, ids), joined)
        if objective.why_constant is not None:
            raise RequestError(objective.why_constant)
    except ShoalError as error:
        if not _is_excused(error.__cause__):
            raise RequestError(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise


def try_metrics(recipe: Recipe, model: nn.Module, loss: Any, data: Splits) -> list[str]:
    """Measure the first held-out samples with the metrics that the recipe names; returns what the user should know of them.

    A function of all samples may rightly refuse a few, such as those of one class: that is told, and the run decides.

    Args:
        recipe: as it will run.
        model: that the first samples have gone through.
        loss: of its output and the targets.
        data: with the validation split.

    Raises:
        RequestError: a metric cannot read what the model returns, or the targets, or fails on all that there is to measure.
    """
    names = recipe.eval.metrics
    if not names or not len(data.validation):
        return []
    most = recipe.eval.samples or len(data.validation)
    source = data.validation
    there = source.count(min(most, _TRIED + 1)) if isinstance(source, Streamed) else min(most, len(source))
    precision = Precision.named(recipe.train.precision)
    objective = Objective(model, Scoring(loss), precision=precision, device=torch.device("cpu"))
    first = np.arange(min(there, recipe.eval.batch or _TRIED, _TRIED), dtype=np.int64)
    model.eval()
    with torch.no_grad(), gathering(ALONE):
        items = call_own(lambda: source.collate(first), what="reading the first validation samples")
        microbatch = Microbatch.of(items, first)
        inputs, targets = objective.prepare(microbatch)
        try:
            with objective.computing():
                output = objective.scoring.whole_scores(call_model(model, inputs))
        except (
            Exception
        ):  # A module that takes one size of batch, or is not all here yet: what it says is for the run to show.
            return []
        wanted = targets_of(microbatch.form, inputs, targets)
        told: list[str] = []
        for name, metric in zip(names, build_metrics(names), strict=True):
            try:
                try_metric(metric, output, wanted, num_samples=len(first))
            except ShoalError as error:
                is_typo = isinstance(error.__cause__, _NEVER_WORKS)
                if len(first) == there or is_typo or not is_own(name) or not isinstance(metric, GatheredMetric):
                    raise RequestError(f"eval.metrics: {error}") from error
                told.append(
                    f"eval.metrics: on the first {len(first)} of the validation samples, {error}; if it fails on all of them, "
                    "the run ends at its first evaluation"
                )
    return told


def _microbatches(source: Source, global_batch: int, seed: int, plan: Plan) -> list[Ids]:
    """The samples of each microbatch of the first step, those of the first replica first."""
    ids, _, _ = build_order(source, global_batch=global_batch, seed=seed).take(Position())
    shares = range(plan.num_shares)
    return [own for share in shares for own in own_microbatches(ids, share, plan.num_shares, plan.microbatches or 1)]


def _load(data: Splits, ids: Ids) -> Microbatch:
    items = call_own(lambda: data.train.collate(ids), what="reading the first samples", is_excused=is_out_of_memory)
    return Microbatch.of(items, ids)


def _run(objective: Objective, microbatch: Microbatch, joined: Replicas) -> None:
    inputs, targets = objective.prepare(microbatch)
    running: list[str] = []
    with gathering(joined), _following(objective.model, running), objective.computing():
        try:
            output = call_own(
                lambda: call_model(objective.model, inputs), what="the model", is_excused=is_out_of_memory
            )
        except RequestError as error:
            layer = f", in {running[-1]}" if running else ""
            raise RequestError(
                f"{error}{layer}; it was called with {_call_of(objective.model, inputs)}"
            ) from error.__cause__
    with gathering(joined):
        objective.share_of(output, inputs, targets, microbatch, 1.0)


@contextmanager
def _following(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Inside, ``running`` has the layers that are under way, the innermost last; after an error, those that it went through."""

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            kind = repr(module) if not list(module.children()) else type(module).__name__
            running.append(f"layer {name!r}, {kind}, which got {_forms(args)}")

        return hook

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop()

    handles = []
    for name, module in model.named_modules():
        if name:
            handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call_of(model: nn.Module, inputs: ModelInputs) -> str:
    """What a model was given, with the keys of a dict and whether they were keywords."""
    args, kwargs = arguments_of(model, inputs)
    if kwargs:
        return f"the keywords {', '.join(kwargs)}: {_forms(inputs)}"
    if len(args) == 1 and isinstance(args[0], dict):
        keys = ", ".join(map(repr, args[0]))
        return f"a dict with the keys {keys}, none of which its forward pass takes by name: {_forms(inputs)}"
    return _forms(inputs)


def _forms(values: Any) -> str:
    tensors = [value for value in values if isinstance(value, Tensor)]
    shown = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors]
    return " and ".join(shown) or "no tensor"


def _is_excused(cause: BaseException | None) -> bool:
    """True for an error of the user's code that only this process would have: no device of its own, and no peers."""
    if cause is None:
        return False
    if isinstance(cause, KeyError) and cause.args[:1] and cause.args[0] in _OF_A_RANK:
        return True
    return torch.cuda.is_available() or "process group" in str(cause)


class OwnPartsHere:
    """Builds them in this process: the data once, because that may take minutes, and a module anew for every question."""

    def __init__(self) -> None:
        self._built: tuple[AnyDataConfig, int, Splits] | None = None

    def _data(self, recipe: Recipe) -> Splits:
        config, seed = recipe.data, recipe.train.seed
        if self._built is None or self._built[:2] != (config, seed):
            self._built = config, seed, build_splits(config, seed)
        return self._built[2]

    def measure_data(self, recipe: Recipe) -> DataSummary:
        """Build the data that a recipe names and count its samples."""
        splits = self._data(recipe)
        own = options_of(splits.train)
        if recipe.train.steps is None and (own.drop_last or own.sampler is not None or own.weights is not None):
            raise RequestError(
                "data.drop_last and data.sampler say how many steps an epoch has; set train.steps in the place of train.epochs "
                "or train.tokens"
            )
        return DataSummary(
            spec=splits.spec,
            train=len(splits.train),
            validation=len(splits.validation),
            test=len(splits.test),
            description="your own data",
        )

    def check_same_data(self, recipe: Recipe, checkpoints: Path) -> None:
        """Build the data, and compare it with what the newest checkpoint of a folder was trained on.

        Raises:
            RequestError: it is other data.
        """
        refuse_other_data_early(checkpoints, self._data(recipe))

    def check_optimizer(self, recipe: Recipe) -> None:
        """Try the class of torch that a recipe names.

        Raises:
            RequestError: with the nearest name, the arguments that it takes, or why it cannot be used.
        """
        check_named(recipe.optim)

    def check_callbacks(self, recipe: Recipe) -> None:
        """Make the callbacks and metrics that a recipe names.

        Raises:
            RequestError: one cannot be imported or called, or is none.
        """
        build_callbacks(recipe.callbacks)
        build_metrics(recipe.eval.metrics)

    def check_weights(self, recipe: Recipe, spec: DataSpec) -> None:
        """Hold ``model.init`` and ``optim.groups`` to the names of the model, which is built without memory.

        Raises:
            RequestError: names that did not match, or a pattern that matches nothing.
        """
        model = build_without_memory(recipe.model, spec)
        freeze(model, recipe.optim)
        init = recipe.model.init
        if init is not None:
            match(wanted_of(model), open_weights(Path(init.path)).shapes, selection_of(init), origin=init.path)

    def check_fragments(self, recipe: Recipe, spec: DataSpec, plan: Plan) -> None:
        """Count the layers that are trained, of the model without memory.

        Raises:
            RequestError: there are fewer than the plan has fragments.
        """
        model = build_without_memory(recipe.model, spec)
        freeze(model, recipe.optim)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        check_fragments(SyncRule.parse(plan.sync), trained)

    def check_plan(self, recipe: Recipe, plan: Plan) -> None:
        """Build the module, look at what it is made of, and refuse a plan that does not fit it.

        Raises:
            RequestError: lists every problem, and the nearest plan that works; or says why it cannot be cut into stages.
        """
        model, _, data = build_parts(recipe, data=self._data(recipe), loads=False)
        make_dense(model)
        analysis = analyse(model, data, recipe.parallel)
        plan.check(describe_facts(analysis, model))
        if plan.pp > 1:
            stages = resolve_stages(model, data, analysis, plan=plan, settings=recipe.settings)
            prove_stages(model, example_of(data), stages)

    def _refuse_order(self, recipe: Recipe, plan: Plan) -> None:
        """Workers of parameter servers find the samples of any step at once, from its number."""
        source = self._data(recipe).train
        own = options_of(source)
        has_own = own.drop_last or own.sampler is not None or own.weights is not None or own.shuffle is False
        if plan.ps and (has_own or isinstance(source, Streamed)):
            what = "an iterable dataset" if isinstance(source, Streamed) else "an order of the user's own"
            raise RequestError(
                f"plan {str(plan)!r}: workers take steps in any order, and the training data is {what}; use a plan with dp, or a "
                "map-style dataset without data.shuffle, data.drop_last and data.sampler"
            )

    def try_parts(self, recipe: Recipe, plan: Plan) -> tuple[str, ...]:
        """Run the first samples through the user's own parts; what the user should know of them.

        Raises:
            RequestError: data, model and loss do not fit one another.
        """
        self._refuse_order(recipe, plan)
        model, loss, data = build_parts(recipe, data=self._data(recipe), loads=False)
        found = find_other_mean(model, loss, data.train, plan=plan, train=recipe.train)
        try_first_samples(recipe, plan, model, loss, data)
        told = try_metrics(recipe, model, loss, data)
        return (*(() if found is None else (found,)), *told)
