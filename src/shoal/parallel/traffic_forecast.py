"""What one step of a plan should move between ranks: the accounts of all techniques put together, and the small sums of the step.

Worked out from the plain model, the layout and the batch, not from what the code did, which is counted. A difference between
the two is a collective too many, too few or of the wrong size, whatever the numbers that it carried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.comm.mesh import Mesh
from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.parallel.apply import ModelLayout
from shoal.parallel.data import Reduction
from shoal.parallel.tensor.traffic_forecast import CrossingRecord
from shoal.parallel.tensor.traffic_forecast import forecast_traffic as forecast_tensor_traffic
from shoal.parallel.zero.apply import ZeroReduction

_FLOAT64 = 8


@dataclass(frozen=True, kw_only=True)
class MicrobatchShape:
    """What traffic depends on in one microbatch of one rank."""

    samples: int
    targets: int | None
    """Targets whose loss is computed from split scores; None where scores are whole, or nothing counts."""
    record: CrossingRecord | None = None
    """Of what the plain model does with it on this rank; needed with ``tp``."""
    gathered_scores: int = 0
    """Bytes of the scores, padding included, where a loss of the user's own wants them whole."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the step's own small sums depend on."""

    has_piggyback: bool
    """The loss and the request to stop are piggybacked on the gradients."""
    exact_norm: bool
    """The norm comes from float64 sums per row, because gradients are clipped by it."""
    counts_weight: bool
    """Samples weigh differently, so replicas add up their weights."""
    num_trust_norms: int = 0
    """Norms of whole tensors that the optimizer asks for (LARS, LAMB)."""
    weight_bytes: int = 4
    compute_bytes: int = 4
    num_rows: int = 0
    """Rows of all whole trained parameters of the model, which norms of cut tensors are made of."""


def forecast_step_traffic(
    *,
    plan: Plan,
    mesh: Mesh,
    layout: ModelLayout,
    reduction: Reduction,
    microbatches: Sequence[MicrobatchShape],
    step: StepShape,
    counted: Mapping[tuple[str, str], Traffic],
) -> TrafficCounts:
    """Calls and bytes by axis and operation.

    Args: plan: what runs. mesh: where this rank stands. layout: what techniques made of the model; a context-parallel one has
    noted the attentions of this step. reduction: what this rank updates.
    microbatches: of this rank in this step. step: the rest. counted: what was counted. Only one number is taken from it:
    into how many buckets DDP cut the gradients. Their bytes are not.
    """
    accounts: list[TrafficCounts] = []
    for microbatch in microbatches:
        if microbatch.record is not None and mesh.has(Axis.TENSOR):
            accounts.append(
                forecast_tensor_traffic(
                    microbatch.record,
                    plan,
                    batch=microbatch.samples,
                    compute_bytes=step.compute_bytes,
                    weight_bytes=step.weight_bytes,
                    num_targets=microbatch.targets,
                )
            )
            if microbatch.gathered_scores:
                accounts.append(_one("tp", "all_gather", microbatch.gathered_scores))
    if layout.context is not None:
        accounts.append(layout.context.forecast_traffic(recomputes=plan.recompute != "none"))
    accounts.append(_gradients(reduction, mesh, step, max(1, len(microbatches)), counted))
    if layout.partial:
        held = [parameter.nbytes for name, parameter in reduction.updated.items() if name in layout.partial]
        accounts.append(_one("tp", "all_reduce", sum(held)) if held else {})
    accounts.append(_small_sums(plan, mesh, layout, step))
    return add_traffic(*accounts)


def _gradients(
    reduction: Reduction, mesh: Mesh, step: StepShape, num_microbatches: int, counted: Mapping[tuple[str, str], Traffic]
) -> TrafficCounts:
    if isinstance(reduction, ZeroReduction):
        return reduction.forecast_traffic(num_microbatches)
    if reduction.exchange is not None:
        return reduction.exchange.forecast_traffic()
    if mesh.replicas.size == 1:
        return {}
    num_bytes = sum(parameter.nbytes for parameter in reduction.updated.values())
    num_bytes += 2 * step.weight_bytes if step.has_piggyback else 0
    key = (mesh.replicas.axis, "all_reduce")
    return {key: Traffic(calls=max(1, counted.get(key, Traffic()).calls), num_bytes=num_bytes)}


def _small_sums(plan: Plan, mesh: Mesh, layout: ModelLayout, step: StepShape) -> TrafficCounts:
    """The norm, the loss with the request to stop, and the weight of the global batch."""
    accounts: list[TrafficCounts] = []
    cuts = bool(layout.placements) or plan.zero > 0 or mesh.has(Axis.PIPELINE)
    if cuts:
        by_row = step.num_rows * _FLOAT64
        sums = [by_row if step.exact_norm else _FLOAT64, *[by_row] * step.num_trust_norms]
        for num_bytes in sums:
            accounts.append(_one("tp", "all_reduce", num_bytes) if mesh.has(Axis.TENSOR) else {})
            accounts.append(_one("pp", "all_reduce", num_bytes) if mesh.has(Axis.PIPELINE) else {})
            accounts.append(_one("dp", "all_reduce", num_bytes) if plan.zero > 0 and mesh.has(Axis.DATA) else {})
    if not step.has_piggyback and mesh.everyone.size > 1:
        accounts.append(_one("everyone", "all_reduce", 2 * step.weight_bytes))
    if step.counts_weight and mesh.has(Axis.DATA):
        accounts.append(_one("dp", "all_reduce", _FLOAT64))
    return add_traffic(*accounts)


def count_trust_norms(optimizer: object, groups: Sequence[Mapping[str, object]]) -> int:
    """Collective norms of one optimizer step: of weights and of moves, for each group that adapts its step length."""
    has_trust = getattr(optimizer, "norms", None) is not None
    return 2 * sum(bool(group.get("adapt", True)) for group in groups) if has_trust else 0


def _one(axis: str, operation: str, num_bytes: int) -> TrafficCounts:
    return {(axis, operation): Traffic(calls=1, num_bytes=num_bytes)}
