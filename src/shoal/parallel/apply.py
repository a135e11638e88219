"""The techniques that lay a model out over ranks, in the order in which they are applied. This page is the list.

Order matters. What cuts matrices comes first, because everything after it counts the local shapes. What must also hold in a
recomputed forward pass comes before recompute, which wraps it. Compilation comes before the data-parallel wrapper, whose hooks
must stay outside the compiled graph; and that wrapper comes last, because it must see every parameter in its final place.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.compression.config import CompressionConfig
from shoal.core.axes import Axis
from shoal.core.placement import Placement
from shoal.core.plan import Plan
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.batchnorm import apply_batchnorm
from shoal.parallel.compressed import Compressing
from shoal.parallel.context.apply import ContextLayout, apply_context_parallel
from shoal.parallel.data import Reduction, ReplicaReduction, apply_data_parallel
from shoal.parallel.dropout import narrow_dropouts
from shoal.parallel.logical import ShardedRounds, WholeRounds
from shoal.parallel.recompute import Mode, apply_recompute
from shoal.parallel.tensor.apply import TensorLayout, apply_tensor_parallel
from shoal.parallel.zero.apply import apply_zero
from shoal.randomness.dropout import DropoutKey


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """How a model was laid out over ranks: what its loss, its update and its checkpoints need to know."""

    tensor: TensorLayout | None = None
    context: ContextLayout | None = None

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Parameters that a tensor-parallel rank holds in part."""
        return self.tensor.placements if self.tensor is not None else {}

    @property
    def partial(self) -> frozenset[str]:
        """Parameters whose gradients are still to be added over the tensor-parallel ranks."""
        return self.tensor.partial if self.tensor is not None else frozenset()


def apply_to_model(
    model: nn.Module, *, plan: Plan, mesh: Mesh, analysis: ModuleAnalysis, dropout: DropoutKey, batch_norm: str
) -> ModelLayout:
    """Change a model in place so that it computes under a plan what it computes alone."""
    tensor, context = None, None
    # 1. Tensor parallelism, and the sequence between its regions.
    if mesh.has(Axis.TENSOR):
        tensor = apply_tensor_parallel(model, analysis=analysis, mesh=mesh, sequence_parallel=plan.sp)
    # 2. Context parallelism: attention across the ranks that share a sequence.
    if mesh.has(Axis.CONTEXT):
        context = apply_context_parallel(model, analysis=analysis, mesh=mesh, kind=plan.cp_kind)
    # 3. Dropout draws the part of its mask that this rank sees.
    if tensor is not None or context is not None:
        narrow_dropouts(dropout, analysis=analysis, mesh=mesh, plan=plan)
    # 4. Batch norm: running statistics that are the same on every replica, in one process too.
    apply_batchnorm(model, group=mesh.group(Axis.DATA), mode=batch_norm)
    # 5. Recompute, around all of it.
    if plan.recompute in ("selective", "full"):
        mode: Mode = "full" if plan.recompute == "full" else "selective"
        apply_recompute(model, analysis=analysis, mode=mode, dropout=dropout)
    return ModelLayout(tensor=tensor, context=context)


def apply_to_objective(
    objective: nn.Module,
    *,
    plan: Plan,
    mesh: Mesh,
    analysis: ModuleAnalysis,
    layout: ModelLayout,
    device: torch.device,
    compile_model: bool,
    unused_parameters: bool,
    compressing: Compressing | None = None,
    gathering: CompressionConfig | None = None,
) -> tuple[nn.Module, Reduction]:
    """Wrap the model and its loss so that a backward pass leaves the reduced gradient behind."""
    model = objective.get_submodule("model")
    # 6. Compilation.
    if compile_model:
        model.compile()
    # 7. Data parallelism, with ZeRO or without, by a codec or as gradients are.
    if plan.zero > 0:
        sharded = apply_zero(
            model,
            analysis=analysis,
            mesh=mesh,
            stage=plan.zero,
            # Rounds are summed when they are over, from whole gradients.
            num_microbatches=max(plan.microbatches or 1, 2) if mesh.has_absent else plan.microbatches or 1,
            placements=layout.placements,
            compressing=compressing,
            gathering=gathering,
        )
        return objective, ShardedRounds(sharded) if mesh.has_absent else sharded
    if compressing is not None:
        return objective, ReplicaReduction(
            model, objective, layout.placements, replicas=mesh.replicas, compressing=compressing
        )
    if mesh.has_absent:
        whole = ReplicaReduction(model, objective, layout.placements)
        return objective, WholeRounds(whole, objective, mesh.replicas, allows_untouched=unused_parameters)
    if mesh.replicas.size > 1:
        wrapped = apply_data_parallel(objective, mesh=mesh, device=device, unused_parameters=unused_parameters)
        return wrapped, ReplicaReduction(model, wrapped, layout.placements)
    return objective, ReplicaReduction(model, objective, layout.placements)
