"""Activations of one rank: what the plan predicts, beside what the rank really holds; its state is in ``trainer/sizes.py``.

They are predicted by running one rank's forward pass without data, on fake tensors and a mesh without peers, and counting what
autograd keeps; measured, by the same count around the real forward pass.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.plan import Plan
from shoal.costs.fake import faked
from shoal.costs.saved import measure_saved
from shoal.data.loader import Microbatch
from shoal.models.losses import Loss
from shoal.optim.precision import Precision
from shoal.parallel import batchnorm
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.apply import apply_to_model
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.trainer.loop import Trainer
from shoal.trainer.objective import NUM_PASSENGERS
from shoal.trainer.scoring import Scoring


def predict_activations(
    model: nn.Module,
    loss: Loss,
    microbatch: Microbatch,
    *,
    analysis: ModuleAnalysis,
    plan: Plan,
    rank: int,
    precision: Precision,
    has_passengers: bool = False,
) -> int:
    """Bytes that one microbatch's forward pass keeps on one rank, counted on tensors without data.

    ``has_passengers`` says that the loss and the wish to stop ride with the gradients, for which they are kept too.
    """
    mesh = pretend_mesh(plan, rank)
    own = copy.deepcopy(model).to(dtype=precision.weight_dtype).train()
    dropout = apply_keyed_dropout(own, 0)
    laid = apply_to_model(own, plan=plan, mesh=mesh, analysis=analysis, dropout=dropout, batch_norm="local")
    if batchnorm.is_applied(own):
        batchnorm.begin_microbatch(own, 0)
    # A first forward pass finds out whether the model draws functionally, from generators that only real tensors move.
    dropout.begin(0, microbatch.sample_ids[:2])
    with torch.no_grad(), dropout.drawing(), precision.autocast("cpu"):
        own(*(precision.cast_input(tensor[:2]) for tensor in microbatch.inputs))
    dropout.begin(0, microbatch.sample_ids)
    scoring = Scoring(loss, laid=laid, mesh=mesh)
    targets, _ = scoring.own_part(microbatch.targets, microbatch.weight)
    # Outside the fake tensors: on its way in and out it reads generators, which have real states.
    with dropout.drawing(), faked(own) as mode, mode:
        given = [mode.from_tensor(tensor) for tensor in microbatch.inputs]
        fake_targets = mode.from_tensor(targets)
        # A rank that scores its own positions only has made a tensor of their targets.
        there = [*given, fake_targets] if targets is microbatch.targets else given
        with measure_saved(own, *there) as saved, precision.autocast("cpu"):
            output = own(*(precision.cast_input(tensor) for tensor in given))
            loss_of = scoring.loss(output, precision.cast_input(fake_targets))
    del loss_of
    return saved.num_bytes + (NUM_PASSENGERS * precision.weight_dtype.itemsize if has_passengers else 0)


class ActivationMeter:
    """Counts what the first real microbatch keeps, around the objective's own forward pass."""

    def __init__(self, trainer: Trainer) -> None:
        self.num_bytes: int | None = None
        self.microbatch: Microbatch | None = None
        self._objective = trainer.runner.bare_objective
        self._forward: Callable[..., Any] = self._objective.forward
        self._objective.__dict__["forward"] = self._run

    def _run(self, microbatch: Microbatch | None, *arguments: Any) -> Tensor:
        result: Tensor
        if microbatch is None or self.num_bytes is not None:
            result = self._forward(microbatch, *arguments)
            return result
        inputs: Sequence[Tensor] = (*microbatch.inputs, microbatch.targets)
        with measure_saved(self._objective.model, *inputs) as saved:
            result = self._forward(microbatch, *arguments)
        self.num_bytes, self.microbatch = saved.num_bytes, microbatch
        return result

    def close(self) -> None:
        """Leave the objective as it was."""
        self._objective.__dict__.pop("forward", None)
