"""``ParallelModel``: a model, its optimizer and its plan on this rank, in one interface. ``parallelize`` builds it.

    model = parallelize(module, data, loss, plan=plan, settings=settings, world=world)
    loss = model.forward_backward(batch, step=0)      # the gradient, summed over all ranks, is in .grad
    norm = model.clip()
    model.step(lr=1e-3)

Every decision (skip, clip, stop) is taken from reduced values, which are the same bits on every rank, so ranks never disagree.
Nothing here logs, saves or waits.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, overload

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.core.events import IslandsMeasured, RoundDone
from shoal.core.plan import Plan
from shoal.data.loading.loader import StepBatch
from shoal.data.source import Source
from shoal.engine.async_pipeline import AsyncPipeline
from shoal.engine.compression.saved import SavedSums, say_dropped
from shoal.engine.evaluate import Evaluation, evaluate
from shoal.engine.hooks import Hook, Hooks, LoopRequests, StepResult
from shoal.engine.islands.together import PREFIX as ISLANDS
from shoal.engine.islands.together import Islands
from shoal.engine.metrics import Metric
from shoal.engine.objective import Objective
from shoal.engine.passes import Passes
from shoal.engine.piggyback import StepScalars
from shoal.engine.state import (
    Outline,
    RankState,
    Shard,
    export_rank_state,
    hash_weights_of,
    shards_of,
    whole_weights,
)
from shoal.engine.stop import StopRequest
from shoal.optim.build import set_rate
from shoal.optim.precision import LossScale, Precision
from shoal.parallel import batchnorm
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.apply import ModelLayout
from shoal.parallel.data import Reduction, sum_partial_
from shoal.parallel.describe import describe
from shoal.parallel.gradnorm import WholeNorms, clip_, global_norm
from shoal.parallel.onebit import MomentumSums
from shoal.pipeline.build import Pipeline
from shoal.pipeline.runtime import Runtime

_MOST_NAMED = 5
"""Parameters that a message names; of more it says the number."""


@dataclass(kw_only=True, eq=False)
class ParallelModel:
    """One model under one plan, on this rank. What is ``all ranks call it together`` below is a collective."""

    plan: Plan
    """Resolved."""
    model: nn.Module
    """The user's module, changed in place by the plan's techniques."""
    world: World
    mesh: Mesh
    analysis: ModuleAnalysis
    """What was found in the module, where the plan asks for it."""
    layout: ModelLayout
    """How the techniques laid the module out."""
    objective: Objective
    """Model and loss, without a data-parallel wrapper."""
    reduction: Reduction
    """What this rank updates, where that lies in the whole, and how its gradients are summed over replicas."""
    optimizer: torch.optim.Optimizer
    norms: WholeNorms | None
    """How the parts of tensors make whole norms; None where every rank holds them whole."""
    outline: Outline
    """Of the whole model, of which a rank of a pipeline has a part."""
    pipeline: Pipeline | None
    """This rank's stages; None without a pipeline."""
    passes: Passes
    scalars: StepScalars
    max_norm: float | None
    """The norm that gradients are clipped to; None where they are not."""
    allows_unused: bool
    """Parameters may stay without a gradient."""
    asynchronous: AsyncPipeline | None
    """Takes the steps of an asynchronous pipeline, whose stages update by themselves; None elsewhere."""
    islands: Islands | None = None
    """Brings this island together with the others; None where the run is one island."""
    saved_sums: SavedSums | None = None
    """What compressed sums keep in a checkpoint; None where gradients are summed as they are."""
    publishes_by_itself: bool = False
    """The optimizer is a script's own: it has its own rates, and its step brings weights to where forward passes read them."""
    needs_exact_norm: bool = False
    """The rate follows the norm of the gradient, whose bits must then not depend on the plan."""
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """What the user's own step gave beside the loss, over the last global batch; empty without such a step."""
    _is_same_policy: bool = field(default=False, init=False)
    """The checkpoint that is loaded knows this policy and this number of islands."""
    _is_of_islands: bool = field(default=False, init=False)
    """It was saved by a run with islands."""
    _dropped_sums: str | None = field(default=None, init=False)
    """What to say of residuals in the checkpoint, in a run that has none."""
    _loss_scale: float = field(default=1.0, init=False)
    """What is still in the gradients."""
    _samples: int = field(default=0, init=False)
    """Of the last batch, that this island has."""

    @property
    def hooks(self) -> Hooks:
        """Called at fixed points of training; see ``add_hook``."""
        return self.passes.hooks

    @property
    def runtime(self) -> Runtime | None:
        """Executes the schedule of a synchronous pipeline; None without one."""
        return self.passes.runtime

    @property
    def stop(self) -> StopRequest:
        """This rank's request to stop, which steps bring to the others."""
        return self.scalars.stop

    @property
    def precision(self) -> Precision:
        """Of weights and arithmetic."""
        return self.objective.precision

    @cached_property
    def requests(self) -> LoopRequests:
        """What hooks ask of the loop that takes the steps."""
        return LoopRequests(self.stop)

    def add_hook(self, hook: Hook) -> None:
        """Call a hook from now on."""
        self.hooks.add(hook)
        hook.on_attach(self)

    # --- one step

    def train_step(
        self,
        batch: StepBatch,
        *,
        step: int,
        lr: float | Callable[[], float] | None,
        loss_scale: LossScale,
        loss_limit: float = math.inf,
    ) -> StepResult:
        """Take step number ``step`` (counted from 0) on ``batch``, unless its loss is above ``loss_limit`` or not finite.

        A rate that depends on the step's gradient is a function, which is asked when that is known.
        """
        loss = self.forward_backward(batch, step=step, loss_scale=loss_scale.scale)
        self.passes.enter("gradient norm", step)
        norm = self.clip()
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        is_taken = is_finite and loss <= loss_limit
        if is_taken:
            self.passes.enter("optimizer", step)
            self.step(lr=lr() if callable(lr) else lr, number=step)
        elif self.islands is not None and self.islands.goes_on:
            self._pass_over(self.islands, lr=lr() if callable(lr) else lr, number=step)
        if self.passes.has_batch_norm:
            self.passes.enter("wait: batch norm statistics", step)
        self.end_step(is_taken=is_taken)
        result = StepResult(loss=loss, grad_norm=norm, is_finite=is_finite, is_taken=is_taken, metrics=self.metrics)
        for hook in self.hooks:
            hook.on_update(step, result)
        return result

    def take_rounds(self) -> list[RoundDone | IslandsMeasured]:
        """Rounds that islands have held, and what was measured of them, since this was asked last."""
        return [] if self.islands is None else self.islands.take_report()

    @property
    def follows_evaluations(self) -> bool:
        """Evaluations decide something of what comes next, so that a checkpoint must know of them."""
        return self.hooks.follow_evaluations or (self.islands is not None and self.islands.interval.follows_losses)

    def follow_evaluation(self, loss: float) -> None:
        """An evaluation that is part of the schedule had this validation loss."""
        if self.islands is not None:
            self.islands.interval.evaluated(loss)

    def forward_backward(self, batch: StepBatch, *, step: int, loss_scale: float = 1.0) -> float:
        """Leave the gradient of a batch, summed over all ranks, in ``.grad``; returns its loss over all ranks.

        All ranks call it together, each with its replica's part of the batch.

        Args:
            batch: this replica's microbatches.
            step: its number, from 0; dropout is drawn by it.
            loss_scale: what the loss is multiplied by for the backward pass; ``clip`` takes it out of the gradients again.
        """
        for hook in self.hooks:
            hook.on_step_start(step, batch)
        self._loss_scale, self._samples = loss_scale, batch.island_samples
        if self.reduction.exchange is not None:
            self.reduction.exchange.sums.begin_step(step)
        self.reduction.begin_step()
        self.scalars.begin_step()
        self.objective.metrics.begin_step()
        local_losses = self.passes.accumulate(batch, step=step, scale=loss_scale)
        self._sum_gradients(step)
        loss = self.scalars.reduce(local_losses, scale=loss_scale)
        if self.objective.scoring.step is not None:
            self.metrics = self.objective.metrics.reduce(self.mesh, self.objective.device)
        for hook in self.hooks:
            hook.on_gradients(step, self.reduction.updated, loss_scale)
        return loss

    def clip(self) -> float:
        """The norm of the whole gradient, which is then clipped to ``max_norm``; one that is not finite is left as it is."""
        updated = self.reduction.updated
        gradients = {name: parameter.grad for name, parameter in updated.items() if parameter.grad is not None}
        exact = self.max_norm is not None or self.needs_exact_norm
        norm = global_norm(gradients.items(), exact=exact, norms=self.norms) / self._loss_scale
        if math.isfinite(norm):
            exchange = self.reduction.exchange
            limit = None if exchange is not None and exchange.clips_by_itself else self.max_norm
            clip_(gradients.values(), norm=norm, limit=limit, loss_scale=self._loss_scale)
        return norm

    def unscale(self) -> float:
        """Take the loss scale out of the gradients, where nobody clips by it; returns the norm. A gradient with inf stays."""
        limit, self.max_norm = self.max_norm, None
        norm = self.clip()
        self.max_norm, self._loss_scale = limit, 1.0
        return norm

    def step(self, *, lr: float | None, number: int = 0) -> None:
        """Update the weights, and bring them to where forward passes read them.

        Args:
            lr: the rate; None leaves those of the optimizer's groups.
            number: of the step, from 0: islands exchange weights by it.
        """
        if lr is not None:
            set_rate(self.optimizer, lr)
        if self.islands is not None:
            self.islands.before_update()
        self.update()
        if self.islands is not None:
            self._meet(self.islands, number, lr=lr, samples=self._samples)
        if not self.publishes_by_itself:
            self.reduction.publish()

    def _meet(self, islands: Islands, number: int, *, lr: float | None, samples: int) -> None:
        self.passes.enter("wait: other islands", number)
        rate = self.optimizer.param_groups[0]["lr"] if lr is None else lr
        islands.after_update(number, lr=float(rate), samples=samples)

    def _pass_over(self, islands: Islands, *, lr: float | None, number: int) -> None:
        """A step that this island does not take: it learns from nothing, and holds the round that may be due with the others."""
        islands.before_update()
        self._meet(islands, number, lr=lr, samples=0)
        self.reduction.publish()

    def stepped_by_script(self) -> None:
        """A script's own optimizer has stepped: islands meet, and weights go to where forward passes read them."""
        if self.islands is not None:
            self._meet(self.islands, self.islands.next_step, lr=None, samples=self._samples)
            self.islands.end_step()
        self.reduction.publish()

    def update(self) -> None:
        """The optimizer's own step; under 1-bit Adam that of the frozen variance, once it is."""
        exchange = self.reduction.exchange
        if isinstance(exchange, MomentumSums) and exchange.is_compressed:
            exchange.update(self.optimizer)
            exchange.sums.commit()
        else:
            self.optimizer.step()

    def end_step(self, *, is_taken: bool) -> None:
        """Fold the step's statistics of batch norm in, or forget those of a step that was not taken: islands still meet."""
        if self.passes.has_batch_norm:
            batchnorm.fold(self.model, keep=is_taken)
        if self.islands is not None and (is_taken or self.islands.goes_on) and not self.publishes_by_itself:
            self.islands.end_step()

    def _sum_gradients(self, step: int) -> None:
        """What is left of the reduction after the last backward pass."""
        self.passes.enter("wait: gradients of the other ranks", step)
        self.reduction.finish()
        self._refuse_untouched()
        if self.layout.partial:
            sum_partial_(self.reduction.updated, self.layout.partial, self.mesh.channel(Axis.TENSOR))
        if self.islands is not None and self.islands.sums_gradients(step):
            self.islands.average_gradients(
                [one.grad for one in self.reduction.updated.values() if one.grad is not None]
            )

    def _refuse_untouched(self) -> None:
        """Refuse a parameter without a gradient: data parallelism would then leave its whole bucket unsummed, and say nothing.

        Raises:
            RunError: names the parameter and the setting. No refusal: a bug of ours may have lost the gradient.
        """
        if (self.mesh.replicas.size == 1 and not self.mesh.has_absent) or self.allows_unused:
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

    def evaluate(
        self,
        source: Source,
        *,
        split: str,
        batch: int,
        limit: int = 0,
        step: int = 0,
        metrics: Sequence[Metric] = (),
    ) -> Evaluation:
        """Loss and accuracy over the first ``limit`` samples of a split (0: all of them). All ranks call it together.

        Args:
            source: of the samples.
            split: what it is called.
            batch: samples per forward pass.
            limit: samples at most.
            step: steps that were taken before it.
            metrics: computed besides.
        """

        def look() -> Evaluation:
            return evaluate(
                self.objective,
                source,
                split=split,
                mesh=self.mesh,
                batch=batch,
                limit=limit,
                before_batch=lambda: self.passes.enter("evaluate", step - 1),
                runtime=self.runtime,
                metrics=metrics,
            )

        with self.islands.consensus(step) if self.islands is not None else nullcontext():
            found = look()
        for prefix, weights in {key: one for hook in self.hooks for key, one in hook.variants().items()}.items():
            with weights:
                found = found.with_variant(prefix, look())
        for hook in self.hooks:
            hook.on_evaluation(step, found)
        return found

    # --- its state

    def state(self, step: int = 0) -> RankState:
        """What a checkpoint keeps on this rank after ``step`` steps: live tensors, with their placements.

        Its part of weights, buffers, optimizer state, older versions under an asynchronous pipeline, and of what hooks hold.
        """
        own = self._own_state()
        if self.saved_sums is not None:
            own = self.saved_sums.add_to(own)
        return self.hooks.add_tensors(own if self.asynchronous is None else self.asynchronous.add_versions(own, step))

    def state_to_save(self, step: int = 0) -> RankState:
        """What a checkpoint keeps on this rank; of islands their mean, and what each needs. All ranks call it together."""
        own = self.state(step)
        return own if self.islands is None else self.islands.to_save(own)

    def state_to_load(self, own: RankState, saved: Collection[str]) -> RankState:
        """The live tensors of ``own`` by the names that a checkpoint has for them."""
        self._is_of_islands = any(name.startswith(ISLANDS) for name in saved)
        self._dropped_sums = None
        if self.saved_sums is not None:
            own = self.saved_sums.to_load(own, saved)
        elif self.plan.compress is None:
            self._dropped_sums = say_dropped(saved)
        if self.islands is None:
            return own
        found, self._is_same_policy = self.islands.to_load(own, saved)
        return found

    def restored(self) -> str | None:
        """A checkpoint was written into the live tensors: publish the weights. Returns what to tell the user, if anything."""
        self.reduction.publish()
        of_sums = self._dropped_sums if self.saved_sums is None else self.saved_sums.loaded()
        of_islands = None
        if self.islands is not None:
            of_islands = self.islands.went_on(is_same=self._is_same_policy)
        elif self._is_of_islands:
            of_islands = (
                "the checkpoint is of islands: the run goes on from the mean of their weights and optimizer states"
            )
        return "; ".join(said for said in (of_islands, of_sums) if said is not None) or None

    def _own_state(self) -> RankState:
        return export_rank_state(self.model, self.optimizer, self.reduction, self.layout, self.outline)

    def replicated_state(self) -> RankState:
        """What several ranks must hold alike: ``state``, and the weights that forward passes read where those are others."""
        own = self._own_state()
        if self.plan.zero not in (1, 2):
            return own
        # A rank holds some rows, which nobody else has; the whole weights that it gathered are every replica's.
        named = self.model.named_parameters()
        whole = {f"gathered/{name}": parameter.detach() for name, parameter in named if parameter.requires_grad}
        local = {f"gathered/{name}": placement for name, placement in self.layout.placements.items()}
        tensors, placements = {**own.tensors, **whole}, {**own.placements, **local}
        return replace(own, tensors=tensors, placements=placements)

    def whole_weights(self, other: Mapping[str, torch.Tensor] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of the whole model, or of all islands, one after the other by name. All ranks go through it together.

        Args:
            other: tensors in place of some of this rank's, by the names that checkpoints have for them; such as an average.
        """
        own = self._own_state()
        if self.islands is not None:
            other = {**self.islands.agreed_weights(), **(other or {})}
        if other:
            own = replace(own, tensors={**own.tensors, **{f"weights/{name}": one for name, one in other.items()}})
        return whole_weights(
            self.outline,
            own,
            layout=self.layout,
            mesh=self.mesh,
            is_sharded=self.plan.zero > 0,
            is_first_owner=self.is_first_owner,
        )

    @overload
    def state_dict(
        self, *, whole: Literal[True] = True, everywhere: bool = False
    ) -> dict[str, torch.Tensor] | None: ...

    @overload
    def state_dict(self, *, whole: Literal[False]) -> dict[str, Shard]: ...

    def state_dict(
        self, *, whole: bool = True, everywhere: bool = False
    ) -> dict[str, torch.Tensor] | dict[str, Shard] | None:
        """The weights and saved buffers by the names of torch's ``state_dict``, under any plan.

        Args:
            whole: True for whole tensors on the CPU, as one process would have them: ``load_state_dict`` of the plain model takes
                them. They are put together one after the other, and all ranks call it together. False for what this rank holds,
                without a word to the others: live tensors, each with its placement.
            everywhere: give the whole tensors to every rank; otherwise the first rank gets them, and the others None.
        """
        if not whole:
            return shards_of(self._own_state(), self.outline)
        keeps = everywhere or self.world.is_first
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.whole_weights():
            if keeps:
                copy = tensor.detach().to("cpu", copy=True)
                found |= dict.fromkeys(self.outline[name].names, copy)
        return dict(sorted(found.items())) if keeps else None

    def hash_weights(self) -> str:
        """SHA-256 over the whole weights, the same under every plan; all ranks call it together."""
        return hash_weights_of(self.whole_weights())

    def describe(self) -> list[str]:
        """How the plan laid the model out, for people; a line each."""
        lines = describe(self.analysis, self.plan)
        if self.pipeline is not None:
            lines += self.pipeline.stages.describe()
        return lines if self.asynchronous is None else [*lines, *self.asynchronous.describe()]

    def is_first_owner(self, name: str) -> bool:
        """True where this rank speaks for a saved tensor among the ranks of its pipeline."""
        return self.pipeline is None or self.pipeline.is_first_owner(name)

    def close(self) -> None:
        """Give up the groups of ranks; the world is the caller's."""
        if self.islands is not None:
            self.islands.close()
        self.mesh.close()
