"""One process for asynchronous pipelines: what ``reference.py`` is for the others, by the papers' rules of ``oracle.py``.

In ``pipedream`` and ``pipedream-vsync`` microbatch m of all replicas together is one update, the mean is over it alone, and it is
one tick of the learning rate. In ``pipedream-2bw`` a step is one update. Every stage has an optimizer of its own and is clipped
by its own norm. There is no flat sum to compare with: the microbatches of a step meet different weights.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.optim.build import build_optimizer, initialise_state, set_rate
from shoal.optim.rates import rate
from shoal.verify.capture import Recorder, model_tensors, saved_buffers
from shoal.verify.case import Case, Tree
from shoal.verify.oracle import Delay, Oracle
from shoal.verify.parts import (
    Ids,
    Parts,
    assert_alone,
    batch_loss,
    build_parts,
    cut_batch,
    global_batches,
    measure_movement,
    norm_of,
    refuse_not_finite,
    refuse_untouched,
    weigh,
)


def run_delayed(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    """Train ``case.steps`` steps by a delayed rule and record each in ``folder``, as ``run_reference`` does.

    Raises:
        RequestError: the model draws random numbers of its own, or its loss is not finite even here.
    """
    parts = build_parts(case)
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

    def __init__(self, parts: Parts, tree: Tree) -> None:
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
