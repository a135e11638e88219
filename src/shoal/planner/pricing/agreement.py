"""What it takes replicas to agree in other ways than by a dense sum at every step: ``sync`` between islands, and ``compress``.

What a rank moves comes as traffic counts, made by the very functions that ``shoal verify`` compares with what was counted
(``tuning/agreement.py`` calls them); here they become seconds, and state becomes bytes. Between islands a cycle of steps repeats:
most steps of it move nothing. What averaging seldom, or losing digits, does to the loss is not priced.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shoal.comm.trafficcounter import TrafficCounts
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.planner.pricing.codecs import CodecWork, encodes_by
from shoal.planner.pricing.collectives import Group, Wire, all_gather, all_reduce, all_to_all, send, wire_of
from shoal.planner.pricing.cost import StepParts
from shoal.planner.pricing.job import Job, cut_stages, dense_weights, expert_weights, ranks_of_stages, weight_groups

_ROUND_BYTES = 48.0
"""Read and written for each element by a round's own arithmetic: the change, its mean, the outer step and the copy back."""


def is_exact(plan: Plan) -> bool:
    """Whether a plan computes what one process computes: it sums all gradients, whole, at every step."""
    return plan.sync == "allreduce" and plan.compress is None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the fullest rank of a plan moves, computes and keeps so that replicas agree."""

    cycle: tuple[TrafficCounts, ...]
    """What it moves in each step of a cycle; one step where replicas compress a sum at every step."""
    work: tuple[CodecWork, ...]
    """What it encodes and decodes in each of them."""
    touched: tuple[float, ...]
    """Elements that a round's own arithmetic goes over in each of them."""
    kept_bytes: float
    """State beside the model's: agreed weights, momentum, what is in flight, residuals."""
    delay: int = 0
    """Steps that an exchange has until what it brings is needed (``stream``)."""


@dataclass(frozen=True, kw_only=True)
class AgreementTimes:
    """An agreement in seconds and bytes on a cluster, by the steps of its cycle."""

    exchange: tuple[float, ...]
    """On the wire, until what it brings is needed."""
    told: tuple[float, ...]
    """On the wire as well, and waited for at once: whether anybody wants to stop."""
    codec: tuple[float, ...]
    """Encoding and decoding, on the device."""
    update: tuple[float, ...]
    """The round's own arithmetic."""
    sent: tuple[float, ...]
    """Bytes that leave a rank."""
    delay: int

    @property
    def bytes_per_step(self) -> float:
        """Sent by a rank, in the mean."""
        return sum(self.sent) / len(self.sent)

    @property
    def codec_seconds(self) -> float:
        """Of encoding and decoding, in the mean."""
        return sum(self.codec) / len(self.codec)

    def exposed(self, step_seconds: float) -> tuple[float, ...]:
        """What each step of the cycle takes beyond a step of an island alone, where islands are alike and steady.

        An exchange with a delay goes on beside the steps until then, and is waited for when it is needed.
        """
        room = self.delay * step_seconds
        return tuple(
            max(0.0, exchange - room) + sum(others)
            for exchange, *others in zip(self.exchange, self.told, self.codec, self.update, strict=True)
        )

    def mean_seconds(self, step_seconds: float) -> float:
        """Beyond the step of an island, in the mean of a cycle."""
        return sum(self.exposed(step_seconds)) / len(self.exchange)


def rank_shapes(job: Job, plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """Trained parameters of the pipeline rank that has the most, whole."""
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(plan.pp)]
    cuts = cut_stages(job.chain, plan.pp * (plan.chunks or 1))
    for rank, (first, end) in zip(ranks_of_stages(plan), cuts, strict=True):
        for layer in job.chain.layers[first:end]:
            found[rank].update(layer.shapes)
    return max(found, key=lambda shapes: sum(math.prod(shape) for shape in shapes.values()))


def updated_share(job: Job, plan: Plan) -> float:
    """Of the elements of its stages, what one rank updates: tensor parallelism and ZeRO leave it a part."""
    sharing = weight_groups(plan, job.stack.software)
    whole = sum(layer.weights for layer in job.chain.layers)
    dense = sum(dense_weights(layer, plan) for layer in job.chain.layers)
    routed = sum(expert_weights(layer, plan, sharing) for layer in job.chain.layers)
    if plan.zero:
        dense, routed = dense / sharing.dense_shards, routed / sharing.expert_shards
    return (dense + routed) / whole if whole else 1.0


def agreement_wire(job: Job, plan: Plan) -> Wire:
    """Between the ranks of equal coordinates in all islands; without islands, between replicas."""
    among = Group(plan.islands, plan.world_size // plan.islands), Group((plan.dp or 1) * plan.cp, plan.tp)
    return wire_of(among[plan.islands == 1], job.cluster, job.stack.constants)


def price_agreement(job: Job, plan: Plan, agreement: Agreement) -> AgreementTimes:
    """An agreement on the job's cluster."""
    wire = agreement_wire(job, plan)
    is_direct = plan.islands > 1 and SyncRule.parse(plan.sync).graph is not None
    kind = encodes_by(plan)
    bandwidth = job.cluster.device.memory_bandwidth * job.stack.constants.memory
    # What the ranks of an island tell each other stays inside it, and is a few bytes.
    cycle = [{key: each for key, each in counts.items() if key[0] != _INSIDE} for counts in agreement.cycle]
    asked = [{key: each for key, each in counts.items() if key[1] == _ASKED} for counts in cycle]
    rest = [{key: each for key, each in counts.items() if key[1] != _ASKED} for counts in cycle]
    moved = [_move(counts, wire, is_direct=is_direct) for counts in rest]
    told = [_move(counts, wire, is_direct=is_direct) for counts in asked]
    return AgreementTimes(
        exchange=tuple(seconds for seconds, _ in moved),
        told=tuple(seconds for seconds, _ in told),
        codec=tuple(0.0 if kind is None else work.seconds(kind, bandwidth) for work in agreement.work),
        update=tuple(touched * _ROUND_BYTES / bandwidth for touched in agreement.touched),
        sent=tuple(first + second for (_, first), (_, second) in zip(moved, told, strict=True)),
        delay=agreement.delay,
    )


def _move(counts: TrafficCounts, wire: Wire, *, is_direct: bool) -> tuple[float, float]:
    """Seconds of what a rank moves in a step, and the bytes that leave it.

    Counts are of whole tensors: of a sum twice the others' share of it leaves a rank, of a gather and an exchange once. What
    goes to neighbours of a graph is counted once for each of them, and leaves as it is.
    """
    seconds = sent = 0.0
    others = (wire.size - 1) / wire.size
    for (_, operation), traffic in counts.items():
        how, share = _OPERATIONS.get(operation, (all_gather, 1))
        if operation == "all_to_all" and is_direct:
            how, share = send, 0
        # Calls are taken to share their bytes evenly.
        calls = max(1, traffic.calls)
        seconds += calls * how(traffic.num_bytes / calls, wire)
        sent += traffic.num_bytes * (share * others if share else 1.0)
    return seconds, sent


_INSIDE = "everyone"
"""What channels call all ranks of an island."""
_ASKED = "all_reduce_max"
"""The operation by which ranks ask each other for a word."""
_OPERATIONS: dict[str, tuple[Callable[[float, Wire], float], int]] = {
    "all_reduce": (all_reduce, 2),
    _ASKED: (all_reduce, 2),
    "all_to_all": (all_to_all, 1),
}
"""How long each takes, and how many times the others' share of its bytes leaves a rank."""


def agree_parts(parts: StepParts, plan: Plan, times: AgreementTimes, step_seconds: float) -> StepParts:
    """The parts of a step with what agreement takes in the mean.

    Args:
        parts: of an island's step, or of a step with a dense sum.
        plan: says which.
        times: of the agreement.
        step_seconds: of a step without it, which hides what may go on beside it.
    """
    if plan.islands > 1:
        return replace(parts, agree=times.mean_seconds(step_seconds))
    # The compressed sum stands in the place of the dense one; nothing of it goes on beside a backward pass.
    return replace(parts, reduce=times.exchange[0], reduce_hidden=0.0, codec=times.codec[0])
