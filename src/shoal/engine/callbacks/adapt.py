"""The hook of ``optim.adapt``: it makes the numbers that a rule follows, gives them to the rule, and keeps its state.

The gradient noise scale needs the squared norm of every microbatch's gradient. Autograd hands a parameter's hook the gradient of
one backward pass before it is added to those of earlier ones, so the norm costs one more reading of each gradient, no second
copy, and one message of 8 bytes for each microbatch of a step. Microbatches, not replicas, are the shares: two replicas with two
microbatches each measure what one process with four does.

Hypergradient descent keeps the last update, which takes the memory of the weights once more, divided as they are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.trafficcounter import Traffic, TrafficCounts
from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.events import RateAdapted
from shoal.core.placement import Placement
from shoal.data.loading.loader import StepBatch
from shoal.engine.batches.schedule import batch_at, next_level
from shoal.engine.callbacks.adapt_rules import adapt_problems
from shoal.engine.config import TrainConfig
from shoal.engine.evaluate import Evaluation
from shoal.engine.hooks import Hook, HookedModel, LoopRequests, StepResult
from shoal.optim.adapt import (
    BoldState,
    HyperState,
    NoiseState,
    Shares,
    after_cosine,
    after_evaluation,
    after_shares,
    as_values,
    begin,
    from_values,
    gain,
    mean_square,
    noise_scale,
    rate_gain,
)
from shoal.optim.config import OptimConfig
from shoal.parallel.gradnorm import fast_square, global_dot, global_norm

_FLOAT64 = 8


class Adapt(Hook):
    """Follows one rule of ``optim.adapt``. The loop asks ``factor`` for the rate and ``schedule_step`` for the schedule.

    Args:
        optim: the rule and its numbers.
        train: the batch.
        evaluate_every: ``eval.every``.
    """

    name = "adapt"

    def __init__(self, optim: OptimConfig, train: TrainConfig, *, evaluate_every: int = 0) -> None:
        self._config, self._train, self._evaluate_every = optim, train, evaluate_every
        self._base = optim.scale_base or train.global_batch
        self._batch = train.global_batch
        self._found = self._before = begin(optim)
        self._requests: LoopRequests | None = None
        self._meter: _ShareMeter | None = None
        self._updates: _LastUpdate | None = None

    @property
    def factor(self) -> float:
        """What the rate is multiplied by; asked again when a step's gradient is known."""
        found = self._found
        if not isinstance(found, NoiseState):
            return found.factor
        return rate_gain(self._config.name, self._gain) if self._config.adapt == "adascale" else 1.0

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples; None where it is not measured, or not known yet."""
        return noise_scale(self._found, self._base) if isinstance(self._found, NoiseState) else None

    @property
    def level(self) -> int:
        """How often ``train.batch_schedule`` "noise" has doubled the batch."""
        return self._found.level if isinstance(self._found, NoiseState) else 0

    @property
    def _scale(self) -> float:
        return self._batch / self._base

    @property
    def _gain(self) -> float:
        return gain(self._found, scale=self._scale) if isinstance(self._found, NoiseState) else 1.0

    def schedule_step(self, step: int) -> int:
        """The step that the schedule's rate is of: AdaScale goes through a schedule by its progress."""
        if isinstance(self._found, NoiseState) and self._config.adapt == "adascale":
            return math.floor(self._found.progress)
        return step

    def _stop_if_over(self) -> None:
        """End the run when AdaScale has done the work of ``train.steps`` steps of the base batch."""
        is_adascale = isinstance(self._found, NoiseState) and self._config.adapt == "adascale"
        if is_adascale and self._requests is not None and self.schedule_step(0) >= (self._train.steps or math.inf):
            self._requests.stop("adascale")

    def event(self, step: int) -> RateAdapted:
        """What there is to tell after so many steps."""
        is_adascale = self._config.adapt == "adascale" and isinstance(self._found, NoiseState)
        return RateAdapted(
            step=step,
            rule=self._config.adapt,
            rate_factor=self.factor,
            noise_scale=self.noise_scale,
            batch=batch_at(self._train, step, self.level),
            progress=self._found.progress if is_adascale and isinstance(self._found, NoiseState) else None,
        )

    def on_attach(self, model: HookedModel) -> None:
        """See ``Hook``.

        Raises:
            RequestError: the plan cannot carry the rule out.
        """
        problems = adapt_problems(self._config, self._train, model.plan, evaluate_every=self._evaluate_every)
        if problems:
            raise RequestError("\n".join(f"plan {str(model.plan)!r}: {problem}" for problem in problems))
        self._requests = model.requests
        if isinstance(self._found, NoiseState):
            self._meter = _ShareMeter(model)
        elif isinstance(self._found, HyperState):
            self._updates = _LastUpdate(model)

    def on_step_start(self, step: int, batch: StepBatch) -> None:
        """See ``Hook``."""
        self._batch = batch_at(self._train, step, self.level)
        if self._meter is not None:
            self._meter.begin(batch, is_on=step % self._config.adapt_every == 0)

    def on_microbatch(self, step: int, index: int, loss: Tensor | None) -> None:
        """See ``Hook``."""
        if self._meter is not None:
            self._meter.next_share()

    def on_gradients(self, step: int, parameters: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        """See ``Hook``. Hypergradient descent changes the rate of the very step whose gradient it has seen."""
        if self._meter is not None:
            self._meter.reduce(loss_scale)
        if self._updates is not None and isinstance(self._found, HyperState):
            self._before = self._found
            self._found = after_cosine(self._found, self._updates.cosine(parameters), self._config)
            self._updates.note_weights()

    def on_update(self, step: int, result: StepResult) -> None:
        """See ``Hook``. A step that was left out teaches nothing."""
        if self._meter is not None and isinstance(self._found, NoiseState):
            self._after_noise(self._found, result)
            level = next_level(self._train, step + 1, self.level, self.noise_scale)
            self._found = replace(self._found, level=level)
        if self._updates is not None:
            self._updates.note_update()
            if not result.is_taken:
                self._found = self._before

    def _after_noise(self, found: NoiseState, result: StepResult) -> None:
        assert self._meter is not None
        measured, self._meter.measured = self._meter.measured, None
        if not result.is_taken:
            return
        # The gain of the step that was just taken, whose rate was made from what the steps before it have measured.
        progress = found.progress + self._gain
        if measured is not None:
            small, count = measured
            shares = Shares(small=small, large=result.grad_norm**2, count=count)
            smoothing = self._config.adapt_smoothing**self._config.adapt_every
            found = after_shares(found, shares, scale=self._scale, smoothing=smoothing)
        self._found = replace(found, progress=progress)
        self._stop_if_over()

    def forecast_traffic(self, num_rows: int) -> TrafficCounts:
        """What the rule adds to the traffic of the step that was just taken, by axis and operation.

        Args:
            num_rows: of all whole trained parameters of the model.
        """
        if self._meter is not None:
            return self._meter.forecast_traffic()
        return {} if self._updates is None else self._updates.forecast_traffic(num_rows)

    def on_evaluation(self, step: int, found: Evaluation) -> None:
        """See ``Hook``."""
        if isinstance(self._found, BoldState) and found.split == "validation":
            self._found = after_evaluation(self._found, found.loss, self._config)

    def state(self) -> Mapping[str, Any]:
        """See ``Hook``."""
        return {"rule": self._config.adapt, **as_values(self._found)}

    def tensors(self) -> Mapping[str, tuple[Tensor, Placement]]:
        """See ``Hook``."""
        return {} if self._updates is None else self._updates.tensors()

    def load_state(self, values: Mapping[str, Any] | None) -> None:
        """See ``Hook``. What another rule has found says nothing to this one; noise and adascale measure the same."""
        kin = ("noise", "adascale") if isinstance(self._found, NoiseState) else (self._config.adapt,)
        if values is None or values.get("rule") not in kin:
            self._found = begin(self._config)
            if self._updates is not None:
                self._updates.forget()
            return
        self._found = from_values(self._config, values)
        self._stop_if_over()


class _ShareMeter:
    """Squared norms of the gradients of a step's microbatches, of all replicas."""

    def __init__(self, model: HookedModel) -> None:
        self._mesh = model.mesh
        self._num_own = self._num_planned = model.plan.microbatches or 1
        self.measured: tuple[float, int] | None = None
        """``mean_square`` of the step under way, when it is known."""
        self._is_on = self._was_on = False
        self._share = 0
        self._weights: list[float] = []
        self._squares: dict[tuple[int, str], Tensor] = {}
        split = {name for name, placement in model.layout.placements.items() if not placement.is_whole}
        is_first = self._mesh.coordinate(Axis.TENSOR) == 0
        self._device = next(model.model.parameters()).device
        for name, parameter in model.model.named_parameters():
            # Of a tensor that tensor-parallel ranks hold alike, one of them tells.
            if parameter.requires_grad and (is_first or name in split):
                parameter.register_hook(self._look(name))  # type: ignore[no-untyped-call]

    def _look(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            # Not while a step that went wrong is traced, nor in a step that is not measured.
            if self._is_on:
                self._squares[self._share, name] = fast_square(gradient)

        return look

    def begin(self, batch: StepBatch, *, is_on: bool) -> None:
        """A step begins on this replica's part of its batch."""
        self._squares.clear()
        self.measured, self._is_on, self._share = None, is_on, 0
        self._was_on = is_on
        self._num_own = batch.num_microbatches or self._num_planned
        self._weights = [microbatch.weight for microbatch in batch.microbatches]

    def next_share(self) -> None:
        """What comes now is the gradient of the next microbatch."""
        self._share += 1

    def reduce(self, loss_scale: float) -> None:
        """Bring the squares of all replicas together; all ranks call it."""
        if not self._is_on:
            return
        self._is_on = False
        # One place for each microbatch of the step, which one replica fills: the order of sums is that of one process.
        place = self._mesh.coordinate(Axis.DATA) * self._num_own
        found = torch.zeros(2, self._mesh.degree(Axis.DATA) * self._num_own, dtype=torch.float64, device=self._device)
        for share, weight in enumerate(self._weights):
            own = [square for (index, _), square in sorted(self._squares.items()) if index == share]
            found[0, place + share] = torch.stack(own).sum() if own else 0.0
            found[1, place + share] = weight
        self._squares.clear()
        self._mesh.channel(Axis.TENSOR).all_reduce_(found[0])
        squares, weights = self._mesh.channel(Axis.DATA).all_reduce_(found).tolist()
        total = max(1.0, math.fsum(weights))
        self.measured = mean_square([one / loss_scale**2 for one in squares], [weight / total for weight in weights])

    def forecast_traffic(self) -> TrafficCounts:
        """The sums of ``reduce`` in the step that was just taken."""
        count = _FLOAT64 * self._mesh.degree(Axis.DATA) * self._num_own
        sums = {Axis.TENSOR: count, Axis.DATA: 2 * count} if self._was_on else {}
        return {
            (axis.value, "all_reduce"): Traffic(calls=1, num_bytes=size)
            for axis, size in sums.items()
            if self._mesh.has(axis)
        }


class _LastUpdate:
    """What the last step subtracted from the weights that this rank updates."""

    def __init__(self, model: HookedModel) -> None:
        saved_names = {entry.parameter: name for name, entry in model.outline.items() if entry.parameter is not None}
        self._norms, self._mesh = model.norms, model.mesh
        self._is_sharded = model.plan.zero > 0
        self._weights = dict(model.reduction.updated)
        self._saved_names = {name: saved_names[name] for name in self._weights}
        self._placements = model.reduction.placements
        # Between a step's gradient and its end: the weights before it.
        self._kept = {name: torch.zeros_like(weight.detach()) for name, weight in self._weights.items()}

    def cosine(self, parameters: Mapping[str, nn.Parameter]) -> float:
        """Of the gradient and the last update; 0 where one of them is nothing."""
        gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        updates = {name: self._kept[name] for name in gradients}
        lengths = global_norm(gradients.items(), exact=True, norms=self._norms) * global_norm(
            updates.items(), exact=True, norms=self._norms
        )
        dot = global_dot([(name, gradients[name], updates[name]) for name in gradients], norms=self._norms)
        return dot / lengths if lengths else 0.0

    @torch.no_grad()
    def note_weights(self) -> None:
        """A step is about to change the weights."""
        for name, weight in self._weights.items():
            self._kept[name].copy_(weight)

    @torch.no_grad()
    def note_update(self) -> None:
        """A step has changed them, or was left out: then the last update is nothing."""
        for name, weight in self._weights.items():
            self._kept[name].sub_(weight)

    def forecast_traffic(self, num_rows: int) -> TrafficCounts:
        """Three exact sums a step, each of a number for every row, where tensors are cut."""
        axes = [Axis.TENSOR, Axis.PIPELINE, *([Axis.DATA] if self._is_sharded else [])]
        own = Traffic(calls=3, num_bytes=3 * _FLOAT64 * num_rows)
        cut = [axis for axis in axes if self._mesh.has(axis)] if self._norms is not None else []
        return {(axis.value, "all_reduce"): own for axis in cut}

    def forget(self) -> None:
        """There was no update."""
        for one in self._kept.values():
            one.zero_()

    def tensors(self) -> Mapping[str, tuple[Tensor, Placement]]:
        """For checkpoints."""
        return {self._saved_names[name]: (one, self._placements[name]) for name, one in self._kept.items()}
