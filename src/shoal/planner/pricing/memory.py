"""Bytes of a rank under a plan: states, activations in flight by schedule and stage, what is alive for a moment, and the reserve.

States per weight: Rajbhandari et al. 2020 (arXiv:1910.02054), section 3: weights and gradients in the types that the software
keeps them in, 12 bytes of optimizer. Activations: Korthikanti et al. 2022, Table 2, from the chain; in flight: the schedule's
own count, or its published bound in a search. What the caching allocator keeps beyond what is allocated is a number of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from shoal.core.pipelines import DEFAULT_SCHEDULE, schedule_facts
from shoal.core.plan import Plan
from shoal.costs.layers import Layer, LayerKind, ModelCosts, OpKind, TensorSplit
from shoal.planner.hardware.devices import CONTEXT_BYTES
from shoal.planner.pricing.job import Job, count_ranks, dense_weights, expert_weights, layer_weights, weight_groups
from shoal.schedules.catalogue import FAMILIES
from shoal.schedules.families.family import Family, Size

_CAST = 2.0 + 4.0
"""Bytes of an output layer's gradient for a moment: in 16 bit as it comes, and in float32 as it is added up. That both are there
at once at the peak is not in any document: by hand, from the allocated bytes of the SimuMax rows."""
_FUSED_LOSS = 2.0 + 4.0
"""Bytes of a score while a fused loss is computed: 16 bit as it comes, and float32."""
_PLAIN_LOSS = 2.0 + 4.0 + 4.0 + 4.0
"""The same where it is not fused: the score in both types, its exponential, its gradient."""
_NO_PARTS = ("reserve_share", "context_bytes")
_NARROW_BYTES = {"float8": 1.0, "float4": 0.5}
"""Of an element of a product's operand in fewer than 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank at its fullest."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """SavedBytes for backward passes, of all microbatches in flight."""
    working: float
    """Alive for a moment: a layer that is recomputed, a loss, gathered units of ZeRO-3, a gradient in two types."""
    reserve_share: float = 0.05
    """What the allocator holds beyond what is allocated, as a share of that."""
    context_bytes: float = CONTEXT_BYTES
    """The process's own, before its first tensor."""
    versions: float = 0.0
    """Stashed weights of asynchronous schedules. What a bidirectional one holds twice is trained twice: it is in every part."""
    agreement: float = 0.0
    """What islands agreed on last, outer momentum, what is in flight; residuals of compression."""

    @property
    def allocated(self) -> float:
        """All of the above."""
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.working, self.versions)
        return sum(parts) + self.agreement

    @property
    def reserve(self) -> float:
        """What the allocator holds beyond that."""
        return self.reserve_share * self.allocated

    @property
    def device(self) -> float:
        """What the device shows: allocated, reserved and the process's own."""
        return self.allocated + self.reserve + self.context_bytes

    def as_dict(self) -> dict[str, float]:
        """Every part, and the sums."""
        parts = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NO_PARTS}
        return {**parts, "allocated": self.allocated, "reserve": self.reserve, "device": self.device}


def price_memory(
    job: Job, plan: Plan, in_flight: Sequence[float] | None = None, *, ranks: Sequence[int] | None = None
) -> tuple[Memory, ...]:
    """Memory of every pipeline rank, or of some.

    Args:
        job: what is trained.
        plan: how.
        in_flight: microbatches of one stage that each pipeline rank holds at its fullest, from its schedule; the family's
            published bound when left out.
        ranks: along ``pp``; all when left out.
    """
    counts = count_ranks(job.chain, plan)
    stages = (plan.chunks or 1) * (2 if schedule_facts(plan.schedule).is_bidirectional else 1)
    found = []
    for rank in range(plan.pp) if ranks is None else ranks:
        held = in_flight_bound(plan, rank) if in_flight is None else in_flight[rank]
        found.append(_rank(job, plan, counts[rank], held / stages, version_copies(plan, rank)))
    return tuple(found)


def in_flight_bound(plan: Plan, rank: int) -> float:
    """Microbatches of one stage that a pipeline rank holds at its fullest, as its family of schedules promises."""
    if plan.pp == 1:
        return 1.0
    family = _family(plan)
    return float(family.activations(_size(plan, family), rank))


def version_copies(plan: Plan, rank: int) -> int:
    """Copies of its weights that a pipeline rank has beside its parameters, at most, as its family of schedules promises."""
    if plan.pp == 1:
        return 0
    family = _family(plan)
    held = family.versions(_size(plan, family), rank)
    # Passes read copies, also of the newest version, because the optimizer writes to the parameters; only a stage on which each
    # backward pass follows its forward pass at once reads the parameters themselves (``pipeline/versions.py``).
    return held if held > 1 else 0


def _family(plan: Plan) -> Family:
    # A schedule of the user's own says what it holds only when it is read.
    return FAMILIES.get(plan.schedule or DEFAULT_SCHEDULE, FAMILIES["gpipe"])


def _size(plan: Plan, family: Family) -> Size:
    microbatches = plan.microbatches or 1
    # Without a flush the next step's microbatches follow at once.
    return Size(
        plan.pp, max(microbatches, plan.pp) if family.updates.are_asynchronous else microbatches, plan.chunks or 1
    )


def _rank(job: Job, plan: Plan, counted: Mapping[int, int], held: float, copies: int) -> Memory:
    chain, dp = job.chain, plan.dp or 1
    software = job.stack.software
    layers = [(chain.distinct[at], count) for at, count in counted.items()]
    sharing = weight_groups(plan, software)
    dense = sum(dense_weights(layer, plan) * count for layer, count in layers)
    routed = sum(expert_weights(layer, plan, sharing) * count for layer, count in layers)
    has_embedding = any(layer.kind is LayerKind.EMBEDDING for layer, _ in layers)
    if any(layer.tied_to for layer, _ in layers) and not has_embedding:
        # The last stage has a copy of the matrix that it shares with the first, unless both are on one rank.
        dense += next(layer.split_weights for layer in chain.layers if layer.kind is LayerKind.EMBEDDING) / plan.tp
    shards = (dense / sharing.dense_shards + routed / sharing.expert_shards) if plan.zero else dense + routed
    whole = dense + routed
    # A pipeline has gradients whole until its last cell, whatever becomes of them then.
    # So has a compressed sum, which comes once, after the last backward pass.
    is_summed_once = plan.compress is not None and plan.islands == 1
    keeps_whole = plan.pp > 1 or is_summed_once or (software.reduces_once and (plan.microbatches or 1) > 1)
    samples = job.global_batch / (plan.islands * dp * (plan.microbatches or 1))
    kept = [rank_kept_bytes(layer, job, plan, plan.recompute) * samples for layer, _ in layers]
    activations = held * sum(each * count for each, (_, count) in zip(kept, layers, strict=True))
    return Memory(
        weights=_weights_held(job, plan, whole, shards),
        gradients=(shards if plan.zero >= 2 and not keeps_whole else whole) * job.gradient_bytes,
        optimizer=shards * job.optimizer_bytes,
        activations=activations,
        working=max((_working(layer, job, plan, samples, chain) for layer, _ in layers), default=0.0)
        + _gathered(layers, job, plan),
        reserve_share=job.stack.constants.reserve,
        context_bytes=job.cluster.device.context_bytes,
        versions=copies * whole * job.weight_bytes,
    )


def _weights_held(job: Job, plan: Plan, whole: float, shards: float) -> float:
    """Bytes of weights between passes: whole, or the shards, or both where shards are kept wide and what passes read is a cast
    copy (FSDP's SHARD_GRAD_OP; what it gathers for a moment at stage 3 is ``_gathered``)."""
    if plan.zero == 3:
        return shards * job.weight_bytes
    if plan.zero and job.gathered_bytes != job.weight_bytes:
        return shards * job.weight_bytes + whole * job.gathered_bytes
    return whole * job.weight_bytes


def rank_kept_bytes(layer: Layer, job: Job, plan: Plan, recompute: str) -> float:
    """Bytes that one sample leaves behind in a layer on one rank."""
    kept = kept_bytes(layer, tensor=plan.tp, sequence_parallel=plan.sp, context=plan.cp, recompute=recompute)
    if recompute == "selective" and job.stack.software.selects_products:
        # Every second product's result, and what one needs to compute the others again.
        without, whole = (rank_kept_bytes(layer, job, plan, mode) for mode in ("none", "full"))
        return (without + whole) / 2
    spared = job.chain.item_bytes - _NARROW_BYTES.get(job.precision, job.chain.item_bytes)
    if layer.kind is not LayerKind.BLOCK or recompute == "full" or not spared or not job.stack.software.keeps_narrow:
        return kept
    whole, split = _product_inputs(layer)
    return kept - spared * (whole / (plan.tp if plan.sp else 1) + split / plan.tp) / plan.cp


def _product_inputs(layer: Layer) -> tuple[float, float]:
    """Elements of one sample that are kept for products alone: between the split regions, and inside them.

    Not what an attention hands on, which its own backward pass needs as it was, and not what a router reads.
    """
    whole = split = 0.0
    last, attended = OpKind.MATMUL, False
    for op in layer.ops:
        size = op.rows * op.inner * op.count if op.kind is OpKind.MATMUL else 0.0
        if op.experts > 1 or (op.cut is TensorSplit.ROWS and last is not OpKind.ATTENTION):
            split += size
        elif op.cut is TensorSplit.COLUMNS or not attended:
            whole += size
        last, attended = op.kind, attended or op.kind is OpKind.ATTENTION
    return whole, split


def kept_bytes(layer: Layer, *, tensor: int, sequence_parallel: bool, context: int, recompute: str) -> float:
    """Bytes of one sample (Korthikanti et al. 2022, Table 2)."""
    between = tensor if sequence_parallel else 1
    kept = layer.kept
    if layer.kind is LayerKind.HEAD:
        # The loss's own are alive for a moment only: the last stage goes backward at once.
        return 0.0
    # Only blocks are computed again (``parallel/recompute.py``); a chain without any keeps everything.
    mode = recompute if layer.kind is LayerKind.BLOCK else "none"
    if mode == "full":
        return kept.boundary / between / context
    scores = kept.scores if mode == "none" else 0.0
    return (kept.whole / between + (kept.split + scores) / tensor) / context


def _working(layer: Layer, job: Job, plan: Plan, samples: float, chain: ModelCosts) -> float:
    """Bytes that are alive for a moment in a layer's backward pass."""
    if layer.kind is LayerKind.HEAD:
        weights = layer.split_weights or next(
            (one.split_weights for one in chain.layers if one.kind is LayerKind.EMBEDDING), 0.0
        )
        scores = next((op.rows * op.outer for op in layer.ops if op.outer), 0.0) * samples
        return (
            max((_FUSED_LOSS if job.stack.software.fused_loss else _PLAIN_LOSS) * scores, _CAST * weights)
            / plan.tp
            / (plan.cp if scores else 1)
        )
    if plan.recompute != "none" and layer.kind is LayerKind.BLOCK:
        return (rank_kept_bytes(layer, job, plan, "none") - rank_kept_bytes(layer, job, plan, plan.recompute)) * samples
    return 0.0


def _gathered(layers: Sequence[tuple[Layer, int]], job: Job, plan: Plan) -> float:
    """ZeRO-3: the layer that is computed and the one that comes next, whole, with its gradient."""
    if plan.zero < 3:
        return 0.0
    if plan.pp > 1 and job.stack.software.keeps_gathered:
        return (
            sum(layer_weights(layer, plan, job.stack.software) * count for layer, count in layers) * job.gathered_bytes
        )
    largest = max((layer_weights(layer, plan, job.stack.software) for layer, _ in layers), default=0.0)
    return largest * (2 * job.gathered_bytes + job.gradient_bytes)
