"""State of one rank, weights, gradients and optimizer: bytes predicted from shapes and a plan, and bytes really held.

Both must agree to the byte; ``shoal verify`` compares them, and a forecast says them before a run.
"""

import copy
from dataclasses import asdict

from torch import nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.engine.model import ParallelModel
from shoal.optim.config import OptimConfig
from shoal.optim.precision import Precision
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.apply import apply_to_model
from shoal.parallel.state_bytes import measure_state_bytes, predict_state_bytes
from shoal.pipeline.build import RankPart
from shoal.pipeline.reduction import StageReduction
from shoal.randomness.dropout import apply_keyed_dropout

STATE = ("weights", "gradients", "optimizer")


def predict_state(
    model: nn.Module,
    *,
    analysis: ModuleAnalysis,
    plan: Plan,
    rank: int,
    optim: OptimConfig,
    precision: Precision,
    part: RankPart | None = None,
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state of one rank, from the plain model and the plan.

    ``part`` is what the rank's pipeline stages keep; None where it has all.
    """
    mesh = pretend_mesh(plan, rank)
    # In memory, not on the meta device: moving there would untie tied weights.
    own = copy.deepcopy(model).to(dtype=precision.weight_dtype)
    dropout = apply_keyed_dropout(own, 0)
    apply_to_model(own, plan=plan, mesh=mesh, analysis=analysis, dropout=dropout, batch_norm="local")
    if part is not None:
        part.cut(own)
    sizes = predict_state_bytes(
        own,
        analysis=analysis,
        stage=plan.zero,
        num_data_ranks=plan.dp or 1,
        data_rank=mesh.coordinate(Axis.DATA),
        # A pipeline keeps gradients whole until its step is over.
        num_microbatches=max(2, plan.microbatches or 1) if plan.pp > 1 else plan.microbatches or 1,
        optim=optim,
    )
    return {name: value for name, value in asdict(sizes).items() if name in STATE}


def measure_state(model: ParallelModel) -> dict[str, int]:
    """Bytes that a rank really keeps from step to step."""
    reduction = model.reduction
    if isinstance(reduction, StageReduction) and reduction.sharded is not None:
        reduction = reduction.sharded
    sizes = measure_state_bytes(model.model, reduction, model.optimizer)
    # An asynchronous stage has given its gradients back by the time it is looked at.
    kept = ("weights", "optimizer") if model.asynchronous is not None else STATE
    return {name: value for name, value in asdict(sizes).items() if name in kept}
