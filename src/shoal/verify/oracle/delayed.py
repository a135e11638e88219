"""What asynchronous pipelines should compute, by the papers' rules, in one process and without ``pipeline/`` or ``schedules/``.

With n stages, w_s(t) the weights of stage s after t updates and microbatches b = 0, 1, ..., every stage s does

    w_s(t+1) = w_s(t) - rate * d/dw_s f_b(w_1(v_1), ..., w_n(v_n))          one update per microbatch, t = b

    weight stashing   v_s = t - (n - s)     a stage at distance n - s from the end is that many updates behind, stage 1 the most
    vertical sync     v_s = t - (n - 1)     all stages are as far behind as the first
    2BW               v_s = t - 1           one update per step, of the sum over its microbatches; one version behind

with v_s not below 0 (PipeDream, SOSP 2019, section 3.3 and 3.4; 2BW, ICML 2021, section 3.1). "- rate * gradient" stands for
whatever the optimizer does. The whole model runs at once, each stage's weights taken from its own version, so no order of
events can be wrong.

``run_delayed`` trains by these rules as ``reference/train.py`` does by the synchronous one. In ``pipedream`` and
``pipedream-vsync`` microbatch m of all replicas together is one update, the mean is over it alone, and it is one tick of the
learning rate. In ``pipedream-2bw`` a step is one update. Every stage has an optimizer of its own and is clipped by its own norm.
There is no flat sum to compare with: the microbatches of a step meet different weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.optim.build import build_optimizer, initialise_state, set_rate
from shoal.optim.rates import rate
from shoal.verify.reference.case import Case, Tree
from shoal.verify.reference.model import (
    Ids,
    ReferenceModel,
    assert_alone,
    batch_loss,
    build_reference,
    cut_batch,
    global_batches,
    measure_movement,
    norm_of,
    refuse_not_finite,
    refuse_untouched,
    weigh,
)
from shoal.verify.reference.recording import Recorder, model_tensors, saved_buffers


class Delay(StrEnum):
    """Which weights a microbatch meets."""

    STASHED = "pipedream"
    VERTICAL = "pipedream-vsync"
    BUFFERED = "pipedream-2bw"


@dataclass
class Oracle:
    """Trains a model by a delayed rule.

    Args:
        model: whole; its parameters are the newest weights.
        stages: parameter names of each stage, first stage first.
        delay: the rule.
        optimizers: one per stage, over its parameters, made before the first step.
        loss_of: runs the model with the given weights on a microbatch and gives its share of the loss.
    """

    model: nn.Module
    stages: Sequence[Sequence[str]]
    delay: Delay
    optimizers: Sequence[torch.optim.Optimizer]
    loss_of: Callable[[Callable[..., object], int], Tensor]
    before_update: Callable[[int, int], None] | None = None
    """Called with stage and update when gradients are in place: clips, sets the rate."""
    _count: int = 0
    """Updates so far."""
    _history: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Weights by the number of updates that made them; those that no later update will ask for are gone."""

    def __post_init__(self) -> None:
        self._parameters = dict(self.model.named_parameters())
        self._history[0] = self._copy()

    def version(self, stage: int, update: int) -> int:
        """v_s for update t, stages counted from 0."""
        count = len(self.stages)
        behind = {Delay.STASHED: count - 1 - stage, Delay.VERTICAL: count - 1, Delay.BUFFERED: 1}[self.delay]
        return max(0, update - behind)

    def take(self, *replicas: Sequence[int]) -> Tensor:
        """Update number t on the microbatches of each replica (one, but for 2BW); the sum of their losses.

        A replica's microbatches are added in order, then replicas. Where nobody has a microbatch the gradient is zero.
        """
        mixed = {
            name: self._history[self.version(stage, self._count)][name].requires_grad_()
            for stage, names in enumerate(self.stages)
            for name in names
        }
        total, gradients = self._add_up(mixed, replicas[0])
        for microbatches in replicas[1:]:
            loss, own = self._add_up(mixed, microbatches)
            total, gradients = total + loss, {name: gradients[name] + own[name] for name in gradients}
        for stage, names in enumerate(self.stages):
            for name in names:
                self._parameters[name].grad = gradients[name]
            if self.before_update is not None:
                self.before_update(stage, self._count)
            self.optimizers[stage].step()
        self._count += 1
        self._history[self._count] = self._copy()
        oldest = min(self.version(stage, self._count) for stage in range(len(self.stages)))
        self._history = {version: weights for version, weights in self._history.items() if version >= oldest}
        return total

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Those of the last update."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    def _add_up(self, mixed: Mapping[str, Tensor], microbatches: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of one replica."""
        total = torch.zeros(())
        for microbatch in microbatches:
            loss = self.loss_of(lambda *inputs: functional_call(self.model, dict(mixed), inputs), microbatch)
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        found: dict[str, Tensor] = {}
        for name, weight in mixed.items():
            found[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = None
        return total, found

    def _copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}


def run_delayed(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    """Train ``case.steps`` steps by a delayed rule and record each in ``folder``, as ``run_reference`` does.

    Raises:
        RequestError: the model draws random numbers of its own, or its loss is not finite even here.
    """
    parts = build_reference(case)
    training = DelayedTraining(parts, tree)
    recorder = Recorder(folder, "reference")
    initial = {name: parameter.detach().clone() for name, parameter in parts.named}
    for step, ids in enumerate(global_batches(parts)):
        loss = training.step(step, ids)
        norm = math.sqrt(sum(norm * norm for norm in training.norms))
        refuse_not_finite(loss, norm, step)
        recorder.add(loss=loss, norm=norm, skipped=False, tensors=training.tensors())
    recorder.close(flat=None, movement=measure_movement(parts, initial))
    assert_alone()
    return {"flat": None}


class DelayedTraining:
    """A model, its stages' optimizers and the oracle that trains them."""

    def __init__(self, parts: ReferenceModel, tree: Tree) -> None:
        assert parts.precision.first_loss_scale.scale == 1.0, (
            "a delayed update cannot be taken back, so nothing is scaled"
        )
        is_joined = parts.has_batch_norm and parts.case.batch_norm == "sync" and tree.replicas > 1
        assert not is_joined, "synchronised statistics would need all replicas in one forward pass"
        assert tree.delay is not None and tree.directions == 1 and not tree.uses and not tree.turns
        self._parts, self._tree, self._delay = parts, tree, Delay(tree.delay)
        trained = dict(parts.named)
        # In the order of names, which the norm's bits depend on; a weight that is not trained has no versions.
        self._stages = [{name: trained[name] for name in sorted(names) if name in trained} for names in tree.stages]
        assert sum(map(len, self._stages)) == len({name for stage in self._stages for name in stage}), "tied stages"
        self._optimizers = [build_optimizer(parts.optim, parts.model, updated=stage) for stage in self._stages]
        for optimizer in self._optimizers:
            initialise_state(optimizer)
        self._oracle = Oracle(
            parts.model,
            [list(stage) for stage in self._stages],
            self._delay,
            self._optimizers,
            self._loss_of,
            self._before_update,
        )
        self._updates_per_step = 1 if self._delay is Delay.BUFFERED else tree.microbatches
        self._step = 0
        self._cuts: Sequence[Sequence[Ids]] = ()
        self._totals: Sequence[float] = ()
        self.norms = [0.0] * len(self._stages)
        """Of each stage's gradient at its last update, before clipping."""
        self.gradients: dict[str, Tensor] = {}
        """Those gradients."""

    def step(self, step: int, ids: Ids) -> float:
        """All updates of one step; the mean loss over its samples, each by the weights that it met."""
        self._step, self._cuts = step, cut_batch(ids, self._tree)
        weights = [[weigh(self._parts, cut) for cut in cuts] for cuts in self._cuts]
        total = max(1.0, sum(map(sum, weights)))
        every = range(self._tree.microbatches)
        if self._delay is Delay.BUFFERED:
            self._totals = [total] * len(every)
            return float(self._oracle.take(*self._numbers(every)))
        self._totals = [max(1.0, sum(row)) for row in zip(*weights, strict=True)]
        losses = [float(self._oracle.take(*self._numbers([place]))) for place in every]
        return sum(loss * (own / total) for loss, own in zip(losses, self._totals, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """What a recording holds of the step."""
        found = {f"grad/{name}": gradient for name, gradient in self.gradients.items()}
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            found |= model_tensors(stage.items(), optimizer, saved_buffers(self._parts.model))
        return found

    def _numbers(self, places: Sequence[int]) -> list[list[int]]:
        """The microbatches at some places of every replica, as one number each; a short batch has none at its last places."""
        count = self._tree.microbatches
        return [
            [replica * count + place for place in places if len(cuts[place])] for replica, cuts in enumerate(self._cuts)
        ]

    def _loss_of(self, run: Callable[..., object], microbatch: int) -> Tensor:
        replica, place = divmod(microbatch, self._tree.microbatches)
        return batch_loss(self._parts, self._step, self._cuts[replica][place], self._totals[place], run)

    def _before_update(self, stage: int, update: int) -> None:
        parts, named = self._parts, self._stages[stage]
        gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
        refuse_untouched(parts, set(named) - set(gradients))
        norm = norm_of(list(gradients.values()))
        self.norms[stage] = norm
        self.gradients |= {name: gradient.clone() for name, gradient in gradients.items()}
        limit = parts.optim.clip
        if limit is not None and norm > limit:
            for gradient in gradients.values():
                gradient.mul_(limit / norm)
        each = self._updates_per_step
        set_rate(self._optimizers[stage], rate(parts.optim, update, parts.case.total_steps * each))
