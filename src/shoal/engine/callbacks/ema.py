"""An exponential moving average of the weights, under every plan.

A rank averages what it updates: whole tensors, or the rows that are its own, beside them and placed like them. So the average
costs the memory of the weights divided as they are, no communication, and has the bits of one process wherever the weights have
them. Each operation below rounds once per element: a fused multiply-add would round the elements at the end of a shard otherwise
than those in its middle, and another plan cuts elsewhere.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError, RunError
from shoal.core.placement import Placement
from shoal.engine.hooks import Hook, HookedModel, StepResult


@dataclass(frozen=True, kw_only=True)
class _Averaged:
    """One tensor that this rank updates, and its average."""

    weight: nn.Parameter
    average: Tensor
    placement: Placement

    @property
    def live(self) -> Tensor:
        """The weight as it is now, to be written to."""
        return self.weight.detach()


class EMA(Hook):
    """Averages the trained weights: ``average = decay * average + (1 - decay) * weights`` after every ``every`` steps.

    Buffers, such as the statistics of batch norm, are not averaged: whoever uses the average uses them as they are.

    Args:
        decay: how much of the average stays at each update, from 0 to below 1.
        start: until so many steps are done the average is the weights themselves.
        every: steps between updates, at least 1. Steps that were not taken update nothing.
        evaluate: evaluations look at the averaged weights as well and report them as ``ema_loss``, ``ema_accuracy`` and so on.
    """

    name = "ema"
    needs_every_step = True

    def __init__(self, decay: float = 0.999, *, start: int = 0, every: int = 1, evaluate: bool = True) -> None:
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise RequestError(
                f"decay {decay!r} is how much of the average stays; it must be from 0 to below 1, such as 0.999"
            )
        if start < 0 or every < 1:
            raise RequestError(
                f"start {start} and every {every} count steps; start must be at least 0 and every at least 1"
            )
        self.decay, self.start, self.every, self.evaluate = decay, start, every, evaluate
        self._model: HookedModel | None = None
        self._averaged: dict[str, _Averaged] = {}
        self._is_applied = False

    def on_attach(self, model: HookedModel) -> None:
        """See ``Hook``."""
        self._model = model
        saved_names = {entry.parameter: name for name, entry in model.outline.items() if entry.parameter is not None}
        self._averaged = {
            saved_names[name]: _Averaged(
                weight=parameter,
                average=parameter.detach().clone(),
                placement=model.reduction.placements[name],
            )
            for name, parameter in model.reduction.updated.items()
        }

    @torch.no_grad()
    def on_update(self, step: int, result: StepResult) -> None:
        """See ``Hook``."""
        done = step + 1
        if not result.is_taken or done % self.every:
            return
        for one in self._averaged.values():
            if done <= self.start:
                one.average.copy_(one.live)
            else:
                one.average.mul_(self.decay)
                one.average.add_(one.live * (1.0 - self.decay))

    def state(self) -> Mapping[str, Any]:
        """See ``Hook``."""
        return {"decay": self.decay, "start": self.start, "every": self.every}

    def tensors(self) -> Mapping[str, tuple[Tensor, Placement]]:
        """See ``Hook``."""
        if self._is_applied:
            raise RunError(
                "a checkpoint was to be saved inside ema.applied(), where the weights are not the trained ones"
            )
        return {name: (one.average, one.placement) for name, one in self._averaged.items()}

    @torch.no_grad()
    def load_state(self, values: Mapping[str, Any] | None) -> None:
        """See ``Hook``. Where the checkpoint has no average, a new one begins at its weights."""
        if values is None:
            for one in self._averaged.values():
                one.average.copy_(one.live)

    def variants(self) -> Mapping[str, AbstractContextManager[None]]:
        """See ``Hook``."""
        return {"ema": self.applied()} if self.evaluate else {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model's weights are the averaged ones, on every rank; afterwards the trained ones, bit for bit.

        All ranks enter and leave together. No step and no save may happen inside.

        Raises:
            RunError: it is not attached to a model, or this is inside another such block.
        """
        if self._model is None or self._is_applied:
            raise RunError(
                "ema.applied() needs a model that the average is attached to, and cannot be used inside itself"
            )
        self._swap(self._model)
        self._is_applied = True
        try:
            yield
        finally:
            self._swap(self._model)
            self._is_applied = False

    @torch.no_grad()
    def _swap(self, model: HookedModel) -> None:
        """Exchange weights and averages, a tensor at a time, and bring the weights to where forward passes read them."""
        for one in self._averaged.values():
            before = one.live.clone()
            one.live.copy_(one.average)
            one.average.copy_(before)
        model.reduction.publish()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The averaged weights of the whole model, with its other weights as they are, in the order of their names.

        All ranks go through it together.

        Raises:
            RequestError: it is not attached to a model.
        """
        if self._model is None:
            raise RequestError(
                "the average has no weights before it is attached to a model: give it to run.setup(hooks=[...]) in a "
                "script, or to Trainer(hooks=[...])"
            )
        return self._model.whole_weights({name: one.average for name, one in self._averaged.items()})
