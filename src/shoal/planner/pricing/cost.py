"""The parts of a step in seconds: compute by kernel, communication by axis, and what hides what.

All times are seconds on one rank. Ranks of one pipeline place are alike, so a step of thousands of devices is as many parts as
the pipeline has stages.

Volumes per layer and microbatch are Megatron's (Narayanan et al. 2021, arXiv:2104.04473, section 3.2; with sequence parallelism
Korthikanti et al. 2022, section 4.2.2): a sum over ``tp`` per pair in each direction, again where a forward pass is recomputed;
the same bytes as a gather and a scatter with ``sp``. ZeRO moves what Rajbhandari et al. 2020 (arXiv:1910.02054), section 7,
says: as much as a sum of gradients at stages 1 and 2, half as much again at stage 3.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.costs.layers import Layer, LayerKind, OpKind
from shoal.planner.hardware.software import Software
from shoal.planner.pricing.collectives import (
    Group,
    Wire,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_wire,
    neighbour_wire,
    send,
    wire_of,
)
from shoal.planner.pricing.job import (
    Job,
    WeightGroups,
    count_ranks,
    count_stages,
    cut_stages,
    dense_weights,
    expert_weights,
    weight_groups,
)
from shoal.planner.pricing.kernels import KernelTimes, Slice, time_layer

Seconds = float


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One stage and one microbatch. ``input`` and ``weight`` are the two halves of a whole backward pass.

    ``forward``, ``input`` and ``weight`` include what recompute adds and the communication along ``tp``, ``cp`` and ``ep`` that
    nothing hides; ``exposed`` says how much of the three that communication is, by axis.
    """

    forward: Seconds
    input: Seconds
    weight: Seconds
    exposed: Mapping[str, Seconds] = field(default_factory=dict)

    @property
    def backward(self) -> Seconds:
        """Both halves."""
        return self.input + self.weight


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A whole step of one replica's pipeline."""

    stages: tuple[StageTimes, ...]
    """By stage; there are ``pp * chunks`` of them."""
    microbatches: int
    transfer: Seconds = 0.0
    """An activation, or its gradient, from one pipeline rank to the next."""
    overlaps_transfer: bool = True
    """Ranks compute while a transfer goes on. If not, every pass has one in it: of what it takes and what it hands on at once."""
    reduce: Seconds = 0.0
    """Gradients along ``dp``, all of one rank, if nothing hid them."""
    reduce_hidden: Seconds = 0.0
    """How much of ``reduce`` goes on during the last backward passes."""
    gather: Seconds = 0.0
    """Weights along ``dp`` (ZeRO), all of one step, if nothing hid them."""
    gather_hidden: Seconds = 0.0
    """How much of ``gather`` goes on during compute."""
    update: Seconds = 0.0
    """The optimizer, with clipping."""
    fixed: Seconds = 0.0
    """What a step takes whatever its size: launches, the loss, logging."""
    codec: Seconds = 0.0
    """Encoding and decoding of what replicas sum, where it is compressed."""
    agree: Seconds = 0.0
    """What islands take to agree, in the mean over steps; ``simulation/local_sgd.py`` plays it step by step."""

    @property
    def delay(self) -> Seconds:
        """From the end of a pass until another rank has its result: nothing where passes have the transfers in them."""
        return self.transfer if self.overlaps_transfer else 0.0

    @property
    def after_pipeline(self) -> Seconds:
        """What comes after the last cell on the critical path."""
        return (
            max(0.0, self.reduce - self.reduce_hidden)
            + max(0.0, self.gather - self.gather_hidden)
            + self.update
            + self.fixed
            + self.codec
            + self.agree
        )


_UPDATE_BYTES = 40.0
"""Read and written for each weight by a fused Adam with its checks: gradient twice, three float32 values twice, the weight."""
_FIXED = 0.005
"""Seconds of a step that are nobody's: the batch, the loss, the counters. No document says how long these take: by hand, from the
shortest steps of the calibration table (0.1 s); as a fitted constant it went to zero (docs/design/0009-planner.md)."""
_SLOWED = 0.3
"""Of communication that goes on beside compute, what it costs all the same: it takes processors and memory from kernels (15% of
them over NVLink: Isaev et al. 2023, Calculon), and is itself the slower for them (by 13%: Galvatron's overlap coefficient)."""
_TOGETHER = 3.0
"""How host and device add up: kernels differ in size, so some wait for the host and others do not. A norm of this power, between
1 (one after the other) and infinity (the longer of both); by hand, from the residuals of the calibration table."""
_BACKWARD = 2 / 3
"""Of a microbatch's compute, what its backward pass is: two products for each of the forward pass's."""
_HALF = 0.5
"""Of the time that could hide them, what each of gathers and reductions gets: they go over the same links in the same passes
(torch.distributed._tools.fsdp_ilp has a unit's backward hide the gather of the next and the reduction of the last together)."""


@dataclass(frozen=True)
class Wires:
    """What each axis of a plan runs at; the order of ranks is pp, dp, cp, tp, the last next to each other."""

    tensor: Wire
    context: Wire
    data: Wire
    pipeline: Wire
    expert: Wire
    expert_data: Wire
    """Of ranks that have the same experts."""
    groups: tuple[Wire, Wire] | None = None
    """Where ZeRO cuts over groups that hold the same: inside a group, and between those ranks of all groups that have the same
    shard of a dense layer."""


def wires_of(plan: Plan, job: Job) -> Wires:
    """The wires of every axis."""
    tp, cp, dp = plan.tp, plan.cp, plan.dp or 1
    cluster, constants = job.cluster, job.stack.constants
    sharing = weight_groups(plan, job.stack.software)
    return Wires(
        tensor=wire_of(Group(tp, 1), cluster, constants),
        # Keys and values go round from rank to rank: nothing goes by several ways at once, as in a collective.
        context=neighbour_wire(Group(cp, tp), cluster, constants),
        # Ranks that share a sequence have the same weights, and their gradients are summed too.
        data=wire_of(Group(dp * cp, tp), cluster, constants),
        pipeline=neighbour_wire(Group(plan.pp, tp * cp * dp), cluster, constants),
        expert=all_to_all_wire(Group(plan.ep, sharing.expert_split), cluster, constants, copies=_copies(job)),
        expert_data=wire_of(Group(sharing.expert_copies, sharing.expert_split * plan.ep), cluster, constants),
        groups=_groups(sharing, tp, job) if job.stack.software.shard_group else None,
    )


def _groups(sharing: WeightGroups, tp: int, job: Job) -> tuple[Wire, Wire]:
    inside, between = sharing.dense_shards, sharing.dense_copies // sharing.dense_shards
    near, far = Group(inside, tp), Group(between, tp * inside)
    return wire_of(near, job.cluster, job.stack.constants), wire_of(far, job.cluster, job.stack.constants)


def _copies(job: Job) -> int:
    """Of a token, that travel as one between nodes."""
    if not job.stack.software.sends_once:
        return 1
    return max(
        (round(layer.routed_bytes / layer.output_bytes) for layer in job.chain.distinct if layer.routed_bytes),
        default=1,
    )


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer and one microbatch on one rank."""

    forward: float
    input: float
    weight: float
    exposed: Mapping[str, float]


Known = dict[tuple[object, ...], list["LayerTimes"]]
"""Times of a job's distinct layers by what they depend on, so that a search prices a layer once for all plans that share it."""


def price_parts(job: Job, plan: Plan, known: Known | None = None) -> StepParts:
    """Seconds of everything that a step of a plan is made of.

    Args:
        job: what is trained, and on what.
        plan: how; microbatches and chunks are said.
        known: times of layers from earlier calls for the same job; this call adds its own.

    Raises:
        RequestError: stages have several ranks each, of which the closed forms know nothing.
    """
    if plan.replicas is not None:
        raise RequestError(
            f"plan {str(plan)!r}: stages of several ranks (replicas={plan.replicas}) are not priced on a cluster; leave replicas "
            f"out, draw them with `shoal schedule`, or time them on this machine with `shoal train --forecast`"
        )
    dp, pp = plan.dp or 1, plan.pp
    chunks = plan.chunks or 1
    microbatches = plan.microbatches or 1
    samples = job.global_batch / (plan.islands * dp * microbatches)
    wires = wires_of(plan, job)
    sharing = weight_groups(plan, job.stack.software)
    cuts = cut_stages(job.chain, pp * chunks)
    counts = count_stages(job.chain, pp * chunks)
    priced = _priced(job, plan, _slice(plan, sharing, samples), {} if known is None else known)
    summed: dict[tuple[tuple[int, int], ...], StageTimes] = {}
    times = []
    for counted in counts:
        key = tuple(counted.items())
        if key not in summed:
            summed[key] = _sum_stage(counted, priced)
        times.append(summed[key])
    boundary = job.chain.layers[cuts[0][1] - 1].output_bytes
    sent = boundary * samples / plan.cp / (plan.tp if plan.sp or job.stack.software.scatters_transfer else 1)
    dense, routed = max(_rank_weights(job, plan, sharing), key=sum)
    compute = microbatches * max(times[at].forward + times[at].backward for at in range(len(times))) * chunks
    reduce, reduce_hidden, gathered, gather_hidden = _replicas(job, plan, wires, (dense, routed), microbatches, compute)
    updated = dense / sharing.dense_shards + routed / sharing.expert_shards if plan.zero else dense + routed
    constants = job.stack.constants
    return StepParts(
        stages=tuple(times),
        microbatches=microbatches,
        transfer=send(sent, wires.pipeline) if pp > 1 else 0.0,
        overlaps_transfer=job.stack.software.overlaps_transfer,
        reduce=reduce,
        reduce_hidden=reduce_hidden,
        gather=gathered,
        gather_hidden=gather_hidden,
        update=updated * _UPDATE_BYTES / (job.cluster.device.memory_bandwidth * constants.memory),
        fixed=_FIXED,
    )


def least_seconds(job: Job, plan: Plan, known: Known) -> float:
    """Seconds that no plan of this layout, microbatch size and recompute is below, whatever its schedule and ZeRO stage are.

    All layers' work on one microbatch, evenly over the pipeline: no rank waits, sums or updates.

    Args:
        job: what is trained, and on what.
        plan: how; microbatches are said.
        known: times of layers from earlier calls for the same job; this call adds its own.
    """
    microbatches = plan.microbatches or 1
    part = _slice(plan, weight_groups(plan, job.stack.software), job.global_batch / ((plan.dp or 1) * microbatches))
    times = _sum_stage(Counter(job.chain.numbers), _priced(job, plan, part, known))
    return microbatches * (times.forward + times.backward) / plan.pp


def time_one_layer(layer: Layer, job: Job, plan: Plan) -> LayerTimes:
    """Seconds of one layer with the whole batch as one microbatch."""
    part = _slice(plan, weight_groups(plan, job.stack.software), job.global_batch / (plan.dp or 1))
    return _time_layer(layer, job, plan, part, wires_of(plan, job))


def _priced(job: Job, plan: Plan, part: Slice, known: Known) -> list[LayerTimes]:
    depends = (part, plan.recompute, plan.cp_kind)
    if depends not in known:
        wires = wires_of(plan, job)
        known[depends] = [_time_layer(layer, job, plan, part, wires) for layer in job.chain.distinct]
    return known[depends]


def _slice(plan: Plan, sharing: WeightGroups, samples: float) -> Slice:
    return Slice(
        samples=samples,
        tensor=plan.tp,
        sequence_parallel=plan.sp,
        context=plan.cp,
        expert=plan.ep,
        expert_tensor=sharing.expert_split,
    )


def _time_layer(layer: Layer, job: Job, plan: Plan, part: Slice, wires: Wires) -> LayerTimes:
    software, constants = job.stack.software, job.stack.constants
    kernels = time_layer(
        layer,
        part,
        device=job.cluster.device,
        precision=job.precision,
        item_bytes=job.chain.item_bytes,
        software=software,
        constants=constants,
    )
    local = part.samples / plan.cp
    pair = all_reduce(layer.pair_bytes * local, wires.tensor) * layer.num_pairs * (1.0 - software.overlaps_tensor)
    ring = (plan.cp - 1) * send(layer.kv_bytes / plan.tp * local, wires.context) if plan.cp > 1 else 0.0
    # Where experts are whole, tensor-parallel ranks send each their own positions of a sequence.
    exchanged = 2 * all_to_all(layer.routed_bytes * local * part.expert_tensor / plan.tp, wires.expert)
    routed = max(0.0, exchanged - kernels.forward) if software.overlaps_exchange else exchanged
    # Attention of a chunk goes on while the next one's keys and values arrive.
    ring_forward = max(0.0, ring - kernels.attention)
    ring_backward = max(0.0, 2 * ring - 2 * kernels.attention)
    if plan.cp_kind == "alltoall":
        ring_forward = ring_backward = _change_places(layer, job, plan, local)
    tensor_waits, expert_waits = (0.0, 0.0) if software.replays else _meetings(layer, plan)
    missed = constants.sync * (tensor_waits + expert_waits)
    talk = pair + routed
    host = 0.0 if software.replays else kernels.kernels * constants.launch
    forward = _beside(host, kernels.forward + talk + ring_forward) + missed
    backward = _beside(2 * host, kernels.backward + talk + ring_backward) + missed
    again = {"none": 0.0, "selective": _selected(kernels, layer, software), "full": forward}[plan.recompute]
    repeats = 2 if plan.recompute == "full" else 1
    by_weight = kernels.weight
    by_input = backward - by_weight + again
    exposed = {
        "tp": (repeats + 1) * (pair + constants.sync * tensor_waits),
        "ep": (repeats + 1) * (routed + constants.sync * expert_waits),
        "cp": repeats * ring_forward + ring_backward,
    }
    return LayerTimes(forward, by_input, by_weight, exposed)


def _selected(kernels: KernelTimes, layer: Layer, software: Software) -> float:
    """Seconds of what selective recompute does again: attention (Korthikanti et al. 2022, section 5), or every second product and
    all that only reads and writes (torchtitan: ``selective_ac_option``, whose list of saved results has attention in it)."""
    if not software.selects_products:
        return kernels.attention
    if layer.kind is not LayerKind.BLOCK:
        return 0.0
    return (kernels.forward - kernels.attention - kernels.pointwise) / 2 + kernels.pointwise


def _change_places(layer: Layer, job: Job, plan: Plan, local: float) -> float:
    """Seconds in which positions change places with heads: queries, keys and values before an attention, its result after it.

    Nothing hides them: attention needs all, and is needed at once (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509,
    section 3.2). The backward pass does the same with their gradients.
    """
    attentions = (op for op in layer.ops if op.kind is OpKind.ATTENTION)
    queries = sum(op.rows * op.inner * op.heads * op.count for op in attentions) * job.chain.item_bytes
    wire = all_to_all_wire(Group(plan.cp, plan.tp), job.cluster, job.stack.constants)
    return all_to_all((2 * queries + layer.kv_bytes) / plan.tp * local, wire)


def _meetings(layer: Layer, plan: Plan) -> tuple[float, float]:
    """How often ranks wait for each other in one pass of a layer, whatever they exchange, along ``tp`` and along ``ep``.

    Each wait counts for every doubling of those who meet: the latest of n ranks that are late at random (exponentially) is late
    by the n-th harmonic number, which grows like log n (Rényi 1953, "On the theory of order statistics"); how late one is, is
    fitted (``Constants.sync``).
    """
    tensor = layer.num_pairs * math.log2(plan.tp)
    expert = 2 * math.log2(plan.ep) if layer.routed_bytes else 0.0
    return tensor, expert


def _beside(host: float, device: float) -> float:
    """Seconds of launching and of computing side by side: the longer of the two, and more where they are alike."""
    return float((host**_TOGETHER + device**_TOGETHER) ** (1 / _TOGETHER))


def _sum_stage(counted: Mapping[int, int], priced: Sequence[LayerTimes]) -> StageTimes:
    exposed: dict[str, float] = {}
    forward = by_input = by_weight = 0.0
    for layer, count in counted.items():
        times = priced[layer]
        forward += count * times.forward
        by_input += count * times.input
        by_weight += count * times.weight
        for axis, seconds in times.exposed.items():
            exposed[axis] = exposed.get(axis, 0.0) + count * seconds
    return StageTimes(forward=forward, input=by_input, weight=by_weight, exposed=exposed)


def _rank_weights(job: Job, plan: Plan, sharing: WeightGroups) -> list[tuple[float, float]]:
    """Weights of every pipeline rank, in elements, on one tensor-parallel rank: of dense layers and of experts."""
    each = [(dense_weights(layer, plan), expert_weights(layer, plan, sharing)) for layer in job.chain.distinct]
    return [
        (
            sum(each[layer][0] * count for layer, count in counted.items()),
            sum(each[layer][1] * count for layer, count in counted.items()),
        )
        for counted in count_ranks(job.chain, plan)
    ]


def _units(job: Job, plan: Plan) -> int:
    """Layers of a rank: ZeRO-3 gathers and reduces one at a time, and each has its latency."""
    return -(-len(job.chain.layers) // plan.pp)


def hidden_behind(window: Seconds, communication: Seconds) -> Seconds:
    """How much of a communication along dp a step does not feel, given the compute that it goes on beside."""
    return min(communication, window * _HALF) * (1 - _SLOWED)


def _replicas(
    job: Job, plan: Plan, wires: Wires, weights: tuple[float, float], microbatches: int, compute: float
) -> tuple[float, float, float, float]:
    """Seconds of reducing gradients and of gathering weights along dp, each with the part that compute hides."""
    software = job.stack.software
    # A wire of one rank takes no time. Experts are summed over the ranks that have the same ones: none, where ep takes all
    # replicas, and tensor-parallel ranks too where a software leaves them whole.
    dense, routed = weights
    gather_calls = _units(job, plan) if plan.zero == 3 else 1
    reduce_calls = 1 if software.reduces_once else gather_calls
    reduced, gathers = job.reduced_bytes, job.gathered_bytes
    if plan.zero == 0:
        reduce = all_reduce(dense * reduced, wires.data) + all_reduce(routed * reduced, wires.expert_data)
        gathered = 0.0
    else:
        near, far = wires.groups or (wires.data, None)
        experts = wires.expert_data
        reduce = all_gather(dense * reduced, near, reduce_calls) + all_gather(routed * reduced, experts, reduce_calls)
        gathered = all_gather(dense * gathers, near, gather_calls) + all_gather(routed * gathers, experts, gather_calls)
        if far is not None:
            reduce += all_reduce(dense / near.size * reduced, far)
    # For every microbatch, unless a pipeline keeps what it has gathered until its step is over.
    times = 1 if plan.pp > 1 and software.keeps_gathered else microbatches
    if plan.zero == 3:
        gathered *= 2 * times
    # Who keeps a shard of the gradients only must reduce those of every microbatch.
    reduces_each = plan.zero >= 2 and plan.pp == 1 and not software.reduces_once
    if reduces_each:
        reduce *= times
    if schedule_facts(plan.schedule).is_bidirectional:
        # The two ranks that have a stage give each other their sums before replicas add up theirs (``pipeline/share.py``).
        reduce += send(sum(weights) * job.reduced_bytes, wires.pipeline)
    # Behind the backward pass of the last microbatch only, but for what goes on with every one.
    last = compute * _BACKWARD / max(1, microbatches)
    reduce_window = compute if plan.zero == 3 else compute * _BACKWARD if reduces_each else last
    gather_window = compute if plan.zero == 3 else last
    reduce_hidden = hidden_behind(reduce_window, reduce) if software.overlaps_reduce else 0.0
    gather_hidden = hidden_behind(gather_window, gathered) if software.overlaps_gather else 0.0
    return reduce, reduce_hidden, gathered, gather_hidden
