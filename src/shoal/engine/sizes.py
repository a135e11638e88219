"""What one rank keeps, in bytes: predicted from shapes and a plan, and measured on a parallel model.

Both must agree to the byte; ``shoal verify`` compares them, a forecast and a dry run say them before a run. A prediction lays a
copy of the plain model out as on one rank of the plan, with a mesh that has no peers. State is then counted from shapes;
activations by running one microbatch's forward pass on tensors without data.
"""

import copy
from dataclasses import asdict, dataclass

import torch
from torch import nn

from shoal.comm.mesh import Mesh, pretend_mesh
from shoal.compression.config import CompressionConfig
from shoal.core.axes import Axis
from shoal.core.compressrule import CompressRule
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.costs.fake import faked
from shoal.costs.saved import measure_saved
from shoal.data.batchform import call_model, flat_targets, map_targets, targets_of
from shoal.data.loading.loader import Microbatch
from shoal.engine.model import ParallelModel
from shoal.engine.objective import Scoring
from shoal.engine.piggyback import NUM_SCALARS
from shoal.models.losses import Loss
from shoal.optim.config import OptimConfig
from shoal.optim.precision import Precision
from shoal.parallel import batchnorm
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.apply import ModelLayout, apply_to_model
from shoal.parallel.state_bytes import StateBytes, measure_state_bytes, predict_state_bytes
from shoal.pipeline.build import RankPart
from shoal.pipeline.reduction import StageReduction
from shoal.randomness.dropout import DropoutKey, apply_keyed_dropout
from shoal.replicas.memory import policy_copies

STATE = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class RankPreview:
    """A copy of a plain model laid out as on one rank of a plan, without its peers."""

    model: nn.Module
    plan: Plan
    mesh: Mesh
    analysis: ModuleAnalysis
    layout: ModelLayout
    dropout: DropoutKey
    precision: Precision

    @classmethod
    def build(
        cls,
        model: nn.Module,
        *,
        analysis: ModuleAnalysis,
        plan: Plan,
        rank: int,
        precision: Precision,
        part: RankPart | None = None,
    ) -> "RankPreview":
        """Lay a copy out.

        Args:
            model: as one process builds it, in memory or on the meta device. Moving it there would untie tied weights.
            analysis: what was found in it.
            plan: resolved.
            rank: whose part.
            precision: of the run.
            part: what the rank's pipeline stages keep; None where it has all.
        """
        mesh = pretend_mesh(plan, rank)
        own = copy.deepcopy(model).to(dtype=precision.weight_dtype)
        dropout = apply_keyed_dropout(own, 0)
        layout = apply_to_model(own, plan=plan, mesh=mesh, analysis=analysis, dropout=dropout, batch_norm="local")
        if part is not None:
            part.cut(own)
        return cls(
            model=own,
            plan=plan,
            mesh=mesh,
            analysis=analysis,
            layout=layout,
            dropout=dropout,
            precision=precision,
        )

    def state_bytes(
        self, optim: OptimConfig, compression: CompressionConfig | None = None, *, overlaps: bool = False
    ) -> StateBytes:
        """What this rank keeps of trained parameters from step to step, and what it works with.

        ``overlaps`` says that replicas are on several hosts, where units are on their way while others compute.
        """
        plan, compress, islands = self.plan, None, None
        sync = SyncRule.parse(plan.sync)
        if plan.islands > 1:
            islands = plan.islands, self.mesh.coordinate(Axis.ISLAND)
        # Messages of gossip are coded without sums: what they remember is the policy's.
        if plan.compress is not None and sync.kind != "gossip":
            compress = CompressRule.parse(plan.compress), compression or CompressionConfig()
        return predict_state_bytes(
            self.model,
            analysis=self.analysis,
            stage=plan.zero,
            num_data_ranks=self.mesh.degree(Axis.DATA),
            data_rank=self.mesh.coordinate(Axis.DATA),
            # A pipeline keeps gradients whole until the last cell of a step, also of a step of one microbatch.
            num_microbatches=max(2, plan.microbatches or 1) if plan.pp > 1 else plan.microbatches or 1,
            optim=optim,
            num_copies=policy_copies(sync.kind, is_compressed=plan.compress is not None) if plan.islands > 1 else 0,
            compress=compress,
            islands=islands,
            has_masters=compression is not None and compression.weights != "none",
            overlaps=overlaps,
        )

    def activation_bytes(self, loss: Loss, microbatch: Microbatch, *, has_piggyback: bool = False) -> int:
        """What one microbatch's forward pass keeps, counted on tensors without data.

        ``has_piggyback`` says that the loss and the request to stop travel with the gradients, for which they are kept too.
        """
        own, precision, dropout = self.model.train(), self.precision, self.dropout
        if batchnorm.is_applied(own):
            batchnorm.begin_microbatch(own, 0)
        # A first forward pass finds out whether the model draws functionally, from generators that only real tensors move.
        dropout.begin(0, microbatch.sample_ids[:2])
        with torch.no_grad(), dropout.drawing(), precision.autocast("cpu"):
            call_model(own, microbatch.model_inputs.map(lambda tensor: precision.cast_input(tensor[:2])))
        dropout.begin(0, microbatch.sample_ids)
        scoring = Scoring(loss, layout=self.layout, mesh=self.mesh)
        targets, _ = scoring.own_part(microbatch.targets, microbatch.weight)
        # Outside the fake tensors: on its way in and out it reads generators, which have real states.
        with dropout.drawing(), faked(own) as mode, mode:
            given = microbatch.model_inputs.map(mode.from_tensor)
            fake_targets = map_targets(targets, mode.from_tensor)
            # A rank that scores its own positions only has made a tensor of their targets.
            there = [*given, *flat_targets(fake_targets)] if targets is microbatch.targets else given
            with measure_saved(own, *there) as saved, precision.autocast("cpu"):
                cast = given.map(precision.cast_input)
                output = call_model(own, cast)
                wanted = targets_of(microbatch.form, cast, map_targets(fake_targets, precision.cast_input))
                loss_of = scoring.loss(output, wanted)
        del loss_of
        return saved.num_bytes + (NUM_SCALARS * precision.weight_dtype.itemsize if has_piggyback else 0)


def measure_state(model: ParallelModel) -> dict[str, int]:
    """Bytes that a rank really keeps from step to step."""
    reduction = model.reduction
    if isinstance(reduction, StageReduction) and reduction.sharded is not None:
        reduction = reduction.sharded
    sizes = measure_state_bytes(model.model, reduction, model.optimizer)
    # An asynchronous stage has given its gradients back by the time it is looked at.
    kept = ("weights", "optimizer") if model.asynchronous is not None else STATE
    if reduction.exchange is not None:
        kept = (*kept, "compression")
    found = {name: value for name, value in asdict(sizes).items() if name in kept}
    if model.islands is not None:
        found["islands"] = model.islands.num_state_bytes()
        if model.islands.sums is not None:
            found["compression"] = model.islands.sums.num_state_bytes
    return found
