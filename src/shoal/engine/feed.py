"""What a pipeline's runtime asks of a step: its microbatches, how each is computed, and its share of the loss."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.data.loader import Microbatch
from shoal.engine.objective import Objective
from shoal.parallel import batchnorm
from shoal.randomness.dropout import DropoutKey


class StepFeed:
    """Microbatches of one replica, of one step or of several that follow one another; see ``Feed`` of the runtime.

    Args:
        objective: model and loss.
        microbatches: in the order of the schedule's numbers.
        shares: of each in the loss that it is a part of.
        steps: the step that each belongs to, counted from 0; its dropout is drawn by it.
        indices: which microbatch of its step each is.
        scale: what the loss is multiplied by for the backward pass.
        dropout: of the model.
        has_batch_norm: the model's statistics have to be told which microbatch runs.
        enter: told what this rank does now, and at which step.
    """

    def __init__(
        self,
        objective: Objective,
        microbatches: Sequence[Microbatch],
        *,
        shares: Sequence[float],
        steps: Sequence[int],
        indices: Sequence[int],
        scale: float,
        dropout: DropoutKey,
        has_batch_norm: bool,
        enter: Callable[[str, int], None],
    ) -> None:
        self._objective = objective
        self._microbatches = microbatches
        self._shares, self._steps, self._indices = shares, steps, indices
        self._scale = scale
        self._dropout = dropout
        self._has_batch_norm = has_batch_norm
        self._enter = enter
        self.losses: dict[int, Tensor] = {}
        """Shares of the loss, without the scale, of the microbatches whose last stage is here."""

    def inputs(self, microbatch: int) -> Sequence[Any]:
        """See ``Feed``."""
        return self._objective.prepare(self._microbatches[microbatch])[0]

    def kind(self, microbatch: int) -> Hashable:
        """See ``Feed``."""
        return kind_of(self._microbatches[microbatch])

    @contextmanager
    def drawing(self, microbatch: int) -> Iterator[None]:
        """See ``Feed``."""
        step = self._steps[microbatch]
        self._enter("forward", step)
        self._dropout.begin(step, self._microbatches[microbatch].sample_ids)
        self._mark(microbatch)
        with self._objective.computing():
            yield

    def returning(self, microbatch: int) -> None:
        """See ``Feed``."""
        self._enter("backward", self._steps[microbatch])
        self._mark(microbatch)

    def loss(self, output: Any, microbatch: int) -> Tensor:
        """See ``Feed``."""
        own = self._microbatches[microbatch]
        _, targets = self._objective.prepare(own)
        share = self._objective.share_of(output, targets, own, self._shares[microbatch])
        self.losses[microbatch] = share.detach()
        return share if self._scale == 1.0 else share * self._scale

    def total(self, microbatches: Sequence[int]) -> Tensor | float:
        """The sum of some losses in their order; 0 where none ends here."""
        found: Tensor | float = 0.0
        for microbatch in microbatches:
            if microbatch in self.losses:
                found = found + self.losses[microbatch]
        return found

    def _mark(self, microbatch: int) -> None:
        if self._has_batch_norm:
            batchnorm.begin_microbatch(self._objective.model, self._indices[microbatch])


def kind_of(microbatch: Microbatch) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shapes and types of the inputs: what all ranks of a replica know of a microbatch alike."""
    return tuple((tensor.shape, tensor.dtype) for tensor in microbatch.inputs)
