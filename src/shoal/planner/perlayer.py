"""Which dim each layer is split along, for chains whose layers are not alike: dynamic programming over the chain.

A layer on N devices may be split by samples (dp), by parameters (tp) or by an attribute of a sample, its positions (cp), in any
degrees whose product is N; going from one split to another costs a redistribution of the activation in between. These are
FlexFlow's SOAP dims (Jia et al. 2019, arXiv:1807.05358) without the operator dim, which a chain does not have; the recursion is
Galvatron's (Miao et al. 2023, arXiv:2211.13878, eq. 1) without its memory axis. Shoal executes one split for all layers; what
this finds is how much a split of each layer's own could gain at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.combine import divisors
from shoal.core.plan import Plan
from shoal.costs.chain import Chain, Layer
from shoal.planner.collectives import Group, all_reduce, exchange, exchange_wire, wire_of
from shoal.planner.cost import time_one_layer
from shoal.planner.job import Job
from shoal.planner.sharing import layer_weights


@dataclass(frozen=True, order=True)
class Split:
    """Degrees along samples, parameters and positions."""

    samples: int
    parameters: int
    positions: int = 1

    def __str__(self) -> str:
        words = {"sample": self.samples, "parameter": self.parameters, "attribute": self.positions}
        return " x ".join(f"{name} {degree}" for name, degree in words.items() if degree > 1) or "one device"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A split for every layer."""

    splits: tuple[Split, ...]
    seconds: float
    uniform: Split
    """The best single split."""
    uniform_seconds: float

    def runs(self) -> list[tuple[Split, int, int]]:
        """Equal neighbours together: a split, its first layer and its end."""
        found: list[tuple[Split, int, int]] = []
        for at, split in enumerate(self.splits):
            if found and found[-1][0] == split:
                found[-1] = (split, found[-1][1], at + 1)
            else:
                found.append((split, at, at + 1))
        return found


def possible_splits(job: Job, layer: Layer, num_devices: int) -> list[Split]:
    """The splits that a layer can have."""
    chain = job.chain
    found = []
    for parameters in divisors(num_devices):
        # What has no pair of matrices to cut has nothing to split by parameters.
        if parameters > 1 and not (layer.num_pairs and _divides_heads(chain, layer, parameters)):
            continue
        for positions in divisors(num_devices // parameters):
            samples = num_devices // (parameters * positions)
            has_positions = positions == 1 or (layer.kv_bytes > 0 and chain.tokens % positions == 0)
            if has_positions and job.global_batch % samples == 0:
                found.append(Split(samples, parameters, positions))
    return found


def _divides_heads(chain: Chain, layer: Layer, parameters: int) -> bool:
    heads = [count for count in (chain.heads, chain.kv_heads) if count and layer.kv_bytes]
    return all(count % parameters == 0 for count in heads)


def choose_splits(job: Job, *, num_devices: int | None = None) -> Choices | None:
    """The fastest split of every layer, redistributions included; None where no one split is possible for all layers.

    Args:
        job: what is trained, and on what; one microbatch is the whole batch.
        num_devices: of the job's cluster, when it is not all of them.
    """
    devices = num_devices or job.cluster.num_devices
    layers = job.chain.layers
    tables = {
        number: {split: _seconds(job, layer, split) for split in possible_splits(job, layer, devices)}
        for number, layer in enumerate(job.chain.distinct)
    }
    rows = [tables[number] for number in job.chain.numbers]
    shared = set(rows[0]).intersection(*rows[1:])
    if not shared:
        return None
    splits, seconds = _shortest(job, layers, rows)
    uniform = min(sorted(shared), key=lambda split: sum(row[split] for row in rows))
    return Choices(
        splits=tuple(splits),
        seconds=seconds,
        uniform=uniform,
        uniform_seconds=sum(row[uniform] for row in rows),
    )


def _shortest(job: Job, layers: Sequence[Layer], rows: Sequence[Mapping[Split, float]]) -> tuple[list[Split], float]:
    best = dict(rows[0])
    before: list[dict[Split, Split]] = []
    for at in range(1, len(rows)):
        moved = layers[at - 1].output_bytes
        nearer: dict[Split, float] = {}
        came: dict[Split, Split] = {}
        for split, seconds in rows[at].items():
            origin = min(best, key=lambda one: best[one] + redistribute(job, moved, one, split))
            nearer[split] = best[origin] + redistribute(job, moved, origin, split) + seconds
            came[split] = origin
        best = nearer
        before.append(came)
    last = min(best, key=lambda split: best[split])
    path = [last]
    for came in reversed(before):
        path.append(came[path[-1]])
    return path[::-1], best[last]


def redistribute(job: Job, num_bytes: float, old: Split, new: Split) -> float:
    """Seconds until an activation, and its gradient on the way back, lies as the next layer wants it."""
    if (old.samples, old.positions) == (new.samples, new.positions):
        return 0.0
    devices = old.samples * old.parameters * old.positions
    wire = exchange_wire(Group(devices, 1), job.cluster, job.stack.constants)
    share = num_bytes * job.global_batch / min(old.samples * old.positions, new.samples * new.positions)
    return 2 * exchange(share, wire)


def _seconds(job: Job, layer: Layer, split: Split) -> float:
    """Forward, backward and the sum of gradients of one layer under a split."""
    plan = Plan(dp=split.samples, tp=split.parameters, cp=split.positions)
    times = time_one_layer(layer, job, plan)
    replicas = split.samples * split.positions
    wire = wire_of(Group(replicas, split.parameters), job.cluster, job.stack.constants)
    gradients = all_reduce(layer_weights(layer, plan, job.stack.software) * job.reduced_bytes, wire)
    return times.forward + times.input + times.weight + gradients
