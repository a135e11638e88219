"""A replica without samples: what it runs in their place, so that its peers are not left waiting.

The last step of an epoch may have fewer samples than there are replicas or microbatches. Peers wait for such a replica where
gradients are summed, and in every forward pass where layers gather weights (``zero=3``), where statistics are shared (batch norm)
and where stages hand activations on. For the first a loss of zero that touches every parameter is enough; for the others it runs
a microbatch that counts for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.comm.mesh import Mesh
from shoal.core.plan import Plan
from shoal.data.batchform import map_targets
from shoal.data.loading.loader import Microbatch, StepBatch
from shoal.data.source import Source
from shoal.parallel import batchnorm

ANY_SAMPLE = np.zeros(1, dtype=np.int64)
"""What a pass runs on that counts for nothing: not every module takes a batch of none."""


@dataclass(frozen=True, kw_only=True)
class Filler:
    """Fills up the microbatches of a replica that has fewer samples than its peers."""

    microbatch: Microbatch | None = None
    """One that counts for nothing, where forward passes wait for every replica; None where only the sum of gradients does."""
    num_microbatches: int = 1
    """Of a replica that has all its samples."""
    is_pipeline: bool = False

    @classmethod
    def build(
        cls, model: nn.Module, source: Source, *, plan: Plan, mesh: Mesh, is_pipeline: bool, batch_norm: str
    ) -> "Filler":
        """What a plan's replicas are filled up with.

        Args:
            model: laid out.
            source: of samples.
            plan: resolved.
            mesh: the ranks.
            is_pipeline: the model is cut into stages.
            batch_norm: ``train.batch_norm``.
        """
        has_norm = batchnorm.is_applied(model)
        waits = plan.zero == 3 or is_pipeline or (has_norm and batch_norm == "sync")
        microbatch = None
        if waits and (mesh.num_logical > 1 or is_pipeline):
            items = source.collate([0])
            # Statistics of no sample at all are what counts for nothing in them.
            size = 0 if has_norm else 1
            microbatch = Microbatch(
                inputs=tuple(_first(tensor, size) for tensor in items.inputs),
                targets=map_targets(items.targets, lambda tensor: _first(tensor, size)),
                sample_ids=ANY_SAMPLE[:size],
                weight=0.0,
                form=items.form,
            )
        return cls(microbatch=microbatch, num_microbatches=plan.microbatches or 1, is_pipeline=is_pipeline)

    def fill(self, batch: StepBatch) -> tuple[Microbatch, ...]:
        """This replica's microbatches, with empty ones at the end where a forward pass waits for every replica at every index."""
        if self.microbatch is None:
            return batch.microbatches
        count = batch.num_microbatches or self.num_microbatches
        # A schedule has a fixed number of microbatches; elsewhere replicas only have to be in step.
        wanted = count if self.is_pipeline else min(count, batch.num_samples)
        return batch.microbatches + (self.microbatch,) * (wanted - len(batch.microbatches))


def _first(tensor: Tensor, size: int) -> Tensor:
    return tensor[:size] if tensor.ndim else tensor


def zero_through_layers(output: Any) -> Tensor | None:
    """Zero, by way of every layer that an output went through: the mean over no item would be NaN. None without a gradient."""
    if not isinstance(output, Tensor | Mapping | tuple | list) and hasattr(output, "__dict__"):
        output = vars(output)  # An object that pytrees know nothing of, such as one with ``loss`` and ``logits``.
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.reshape(-1)[:0].float().sum() for leaf in leaves]).sum() if leaves else None


def zero_of_parameters(model: nn.Module) -> Tensor:
    """Zero, whose gradient is zeros for every trained parameter, without a forward pass."""
    # The sum of an empty slice is zero and its gradient is zeros: exact even where a weight is NaN, unlike 0 * weight.
    # An index and not a reshape: a parameter that ZeRO has let go is one number expanded, which a reshape would write out.
    parts = [
        parameter[..., :0].sum() if parameter.ndim else parameter.reshape(1)[:0].sum()
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return torch.stack(parts).sum()
