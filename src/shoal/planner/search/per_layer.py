"""Which dims each layer is split along, for chains whose layers are not alike: dynamic programming over the chain.

A layer on N devices may be split by samples (dp), by parameters (tp), by an attribute of a sample, which is its positions or
the rows of an image (cp), and be left to a part of the devices, in any degrees whose product is N. These dims are FlexFlow's
SOAP (Jia et al. 2019, arXiv:1807.05358). Going from one split to another costs a redistribution of the activation in between.
The recursion is Galvatron's (Miao et al. 2023, arXiv:2211.13878, eq. 1); its memory axis is exact here: ways that are neither
faster nor leaner than another are dropped.

Branches that could run at the same time on different devices, FlexFlow's other use of the operator dim, are not known: a traced
module is a chain, in the order in which it ran. Shoal executes one split for all layers; what this finds is how much a split of
each layer's own could gain at most.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from shoal.core.plan import Plan
from shoal.core.units import divisors
from shoal.costs.layers import Layer, LayerKind, ModelCosts, OpKind, TensorSplit
from shoal.planner.pricing.collectives import Group, all_gather, all_reduce, all_to_all, all_to_all_wire, send, wire_of
from shoal.planner.pricing.cost import time_one_layer
from shoal.planner.pricing.job import Job, layer_weights
from shoal.planner.pricing.memory import rank_kept_bytes


@dataclass(frozen=True, order=True)
class Split:
    """Degrees along samples, parameters and an attribute of a sample; and the parts of the devices of which it takes one.

    A layer whose parameters cannot be split is computed by ``parameters`` ranks alike, as tensor-parallel ranks do.
    """

    samples: int
    parameters: int
    positions: int = 1
    places: int = 1
    """Of a chain nothing else runs meanwhile, so the devices of the other places are idle: worth it where talking costs more."""

    @property
    def num_devices(self) -> int:
        """Devices that compute."""
        return self.samples * self.parameters * self.positions

    def __str__(self) -> str:
        words = {"sample": self.samples, "parameter": self.parameters, "attribute": self.positions}
        named = " x ".join(f"{name} {degree}" for name, degree in words.items() if degree > 1) or "one device"
        if self.places == 1:
            return named
        return f"operator on {self.num_devices} of {self.num_devices * self.places} devices, {named}"


class Half(Enum):
    """What a layer is of a pair of matrices, the first cut by columns and the second by rows."""

    NONE = "none"
    """Nothing of it is cut."""
    BOTH = "both"
    """It has whole pairs inside: what goes in and out is whole on every rank."""
    FIRST = "first"
    """Its output is split by features."""
    BETWEEN = "between"
    """It works on each feature by itself: what goes in and out is shared out, or whole."""
    SECOND = "second"
    """What it takes is shared out, and it sums up."""


def half_of(layer: Layer) -> Half:
    """Which half of a pair a layer is; links of a traced module often are one."""
    cuts = {op.cut for op in layer.ops if op.kind is OpKind.MATMUL}
    if layer.num_pairs:
        return Half.SECOND if TensorSplit.ROWS in cuts and TensorSplit.COLUMNS not in cuts else Half.BOTH
    if TensorSplit.COLUMNS in cuts and layer.kind is not LayerKind.HEAD:
        return Half.FIRST
    is_pointwise = not layer.weights and all(op.cut is TensorSplit.ALL for op in layer.ops)
    return Half.BETWEEN if is_pointwise else Half.NONE


@dataclass(frozen=True)
class PricedSplit:
    """One way to compute a layer."""

    split: Split
    takes_shards: bool
    """Ranks that share the parameters have each some of the features that go in."""
    gives_shards: bool
    """The same of those that go out."""
    seconds: float
    num_bytes: float
    """On one device: weights, gradients, the optimizer's state, and what is kept for the backward pass."""


def price_splits(job: Job, layer: Layer, num_devices: int) -> list[PricedSplit]:
    """Every way to compute a layer."""
    half = half_of(layer)
    shards = {
        Half.NONE: [(False, False)],
        Half.BOTH: [(False, False)],
        Half.FIRST: [(False, True)],
        Half.BETWEEN: [(False, False), (True, True)],
        Half.SECOND: [(True, False)],
    }[half]
    return [
        PricedSplit(split, *shared, _seconds(job, layer, split, half), _bytes(job, layer, split))
        for split in possible_splits(job, layer, num_devices)
        for shared in (shards if split.parameters > 1 else [(False, False)])
    ]


def possible_splits(job: Job, layer: Layer, num_devices: int) -> list[Split]:
    """The splits that a layer can have."""
    return list(_splits(job, layer, num_devices))


def _splits(job: Job, layer: Layer, num_devices: int) -> Iterator[Split]:
    for places in divisors(num_devices):
        for parameters in divisors(num_devices // places):
            if parameters > 1 and not _divides_parameters(job, layer, parameters):
                continue
            for positions in divisors(num_devices // places // parameters):
                samples = num_devices // (places * parameters * positions)
                if _divides_attribute(job, layer, positions) and job.global_batch % samples == 0:
                    yield Split(samples, parameters, positions, places)


def _divides_parameters(job: Job, layer: Layer, parameters: int) -> bool:
    heads = [count for count in (job.chain.heads, job.chain.kv_heads) if count and layer.kv_bytes]
    products = [op for op in layer.ops if op.kind is OpKind.MATMUL]
    widths = [op.outer for op in products if op.cut is TensorSplit.COLUMNS] + [
        op.inner for op in products if op.cut is TensorSplit.ROWS
    ]
    return all(size % parameters == 0 for size in (*heads, *widths))


def _divides_attribute(job: Job, layer: Layer, positions: int) -> bool:
    if positions == 1:
        return True
    if layer.image_rows:
        return layer.image_rows % positions == 0
    return layer.kv_bytes > 0 and job.chain.tokens % positions == 0


def _plan(split: Split) -> Plan:
    return Plan(dp=split.samples, tp=split.parameters, cp=split.positions)


def _seconds(job: Job, layer: Layer, split: Split, half: Half) -> float:
    """Forward, backward and the sum of gradients of one layer under a split."""
    plan, constants = _plan(split), job.stack.constants
    times = time_one_layer(layer, job, plan)
    replicas = split.samples * split.positions
    wire = wire_of(Group(replicas, split.parameters), job.cluster, constants)
    gradients = all_reduce(layer_weights(layer, plan, job.stack.software) * job.reduced_bytes, wire)
    return (
        times.forward
        + times.input
        + times.weight
        + gradients
        + _halves(job, layer, split, half)
        + _halo(job, layer, split)
    )


def _halves(job: Job, layer: Layer, split: Split, half: Half) -> float:
    """Seconds by which half a pair differs from a whole one: it sums once, the first half backward, the second forward."""
    if split.parameters == 1 or half not in (Half.FIRST, Half.SECOND):
        return 0.0
    wire = wire_of(Group(split.parameters, 1), job.cluster, job.stack.constants)
    local = job.global_batch / split.samples / split.positions
    exposed = 1.0 - job.stack.software.overlaps_tensor
    if half is Half.FIRST:
        return all_reduce(layer.kept.boundary * local, wire) * exposed
    return -all_reduce(layer.pair_bytes * local, wire) * layer.num_pairs * exposed


def _halo(job: Job, layer: Layer, split: Split) -> float:
    """Seconds of the rows of images that neighbours send each other, and of their gradients on the way back."""
    if split.positions == 1 or not layer.halo_bytes:
        return 0.0
    wire = wire_of(Group(split.positions, split.parameters), job.cluster, job.stack.constants)
    return 2 * send(layer.halo_bytes * job.global_batch / split.samples, wire)


def _bytes(job: Job, layer: Layer, split: Split) -> float:
    plan = _plan(split)
    of_one = job.weight_bytes + job.gradient_bytes + job.optimizer_bytes
    weights = layer_weights(layer, plan, job.stack.software) * of_one
    return weights + rank_kept_bytes(layer, job, plan, "none") * job.global_batch / split.samples


@dataclass(frozen=True)
class ActivationLayout:
    """How an activation lies on the devices."""

    split: Split
    is_sharded: bool

    @property
    def num_pieces(self) -> int:
        """Parts of it that are unlike."""
        return self.split.samples * self.split.positions * (self.split.parameters if self.is_sharded else 1)


def redistribute(job: Job, num_bytes: float, old: ActivationLayout, new: ActivationLayout) -> float:
    """Seconds until an activation, and its gradient on the way back, lies as the next layer wants it.

    Args:
        job: what is trained, and on what.
        num_bytes: of the activation of one sample.
        old: how it lies.
        new: how it shall lie.
    """
    if old == new:
        return 0.0
    whole = num_bytes * job.global_batch
    constants = job.stack.constants
    if old.split == new.split:
        # Whole from shards is a gather, the gradient of that a cut, which costs nothing; and the other way round.
        split = old.split
        wire = wire_of(Group(split.parameters, 1), job.cluster, constants)
        return all_gather(whole / (split.samples * split.positions), wire)
    devices = max(old.split.num_devices, new.split.num_devices)
    wire = all_to_all_wire(Group(devices, 1), job.cluster, constants)
    return 2 * all_to_all(whole / min(old.num_pieces, new.num_pieces), wire)


_MOST_KEPT = 64
"""Partial assignments that are kept for each way an activation can lie, where memory is short: the fastest, and fewer and fewer
of the leaner ones. A chain for which that is too few gets an answer that fits and may not be the best."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A split for every layer."""

    splits: tuple[Split, ...]
    seconds: float
    num_bytes: float
    """Of one device, for all layers; of those that share the devices out unevenly, of the fullest."""
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


@dataclass(frozen=True)
class _Path:
    """Ways for the layers up to one."""

    seconds: float
    num_bytes: float
    split: Split
    before: "_Path | None"

    def splits(self) -> tuple[Split, ...]:
        found, at = [], self
        while True:
            found.append(at.split)
            if at.before is None:
                return tuple(found[::-1])
            at = at.before


def is_uneven(chain: ModelCosts) -> bool:
    """Whether the layers that a pipeline would share out are of more than one kind: two in turn are enough."""
    first, end = chain.block_range
    return len(set(chain.layers[first:end])) > 1


def choose_splits(job: Job) -> Choices | None:
    """The fastest split of every layer that fits, redistributions included; None where no one split for all layers fits."""
    devices = job.cluster.num_devices
    limit = job.cluster.device.free_bytes
    tables = [price_splits(job, layer, devices) for layer in job.chain.distinct]
    rows = [tables[number] for number in job.chain.numbers]
    moves = _Moves(job)
    # What fits without being asked to is the answer, and far quicker to find.
    best = _shortest(job.chain.layers, rows, moves, limit=None)
    if best is not None and best.num_bytes > limit:
        best = _shortest(job.chain.layers, rows, moves, limit=limit)
    uniform = _best_uniform(job.chain.layers, rows, moves, limit)
    if best is None or uniform is None:
        return None
    return Choices(
        splits=best.splits(),
        seconds=best.seconds,
        num_bytes=best.num_bytes,
        uniform=uniform.split,
        uniform_seconds=uniform.seconds,
    )


class _Moves:
    """Redistributions of a job, each priced once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[tuple[float, ActivationLayout, ActivationLayout], float] = {}

    def seconds(self, num_bytes: float, old: ActivationLayout, new: ActivationLayout) -> float:
        if old == new:
            return 0.0
        key = (num_bytes, old, new)
        if key not in self._known:
            self._known[key] = redistribute(self._job, num_bytes, old, new)
        return self._known[key]


def _best_uniform(
    layers: Sequence[Layer], rows: Sequence[Sequence[PricedSplit]], moves: _Moves, limit: float
) -> _Path | None:
    shared = set.intersection(*({way.split for way in row} for row in rows))
    found = []
    for split in sorted(shared):
        path = _shortest(layers, [[way for way in row if way.split == split] for row in rows], moves, limit=None)
        if path is not None and path.num_bytes <= limit:
            found.append(path)
    return min(found, key=lambda path: path.seconds, default=None)


def _shortest(
    layers: Sequence[Layer], rows: Sequence[Sequence[PricedSplit]], moves: _Moves, *, limit: float | None
) -> _Path | None:
    """The fastest of all assignments, or of those that fit."""
    first: dict[ActivationLayout, list[_Path]] = {}
    for way in rows[0]:
        path = _Path(way.seconds, way.num_bytes, way.split, None)
        first.setdefault(ActivationLayout(way.split, way.gives_shards), []).append(path)
    best = _pruned(first, limit)
    for at in range(1, len(rows)):
        moved = layers[at - 1].output_bytes
        # Ways that want their input alike share the look at where it may come from.
        arrived: dict[ActivationLayout, list[_Path]] = {}
        further: dict[ActivationLayout, list[_Path]] = {}
        for way in rows[at]:
            wanted = ActivationLayout(way.split, way.takes_shards)
            if wanted not in arrived:
                arrived[wanted] = _arrive(best, wanted, moved, moves, limit)
            further.setdefault(ActivationLayout(way.split, way.gives_shards), []).extend(
                _Path(path.seconds + way.seconds, path.num_bytes + way.num_bytes, way.split, path.before)
                for path in arrived[wanted]
            )
        best = _pruned(further, limit)
    ended = []
    for lying, paths in best.items():
        # What comes out of the last layer is whole.
        extra = (
            moves.seconds(layers[-1].output_bytes, lying, ActivationLayout(lying.split, False))
            if lying.is_sharded
            else 0.0
        )
        ended += [_Path(path.seconds + extra, path.num_bytes, path.split, path.before) for path in paths]
    return min(ended, key=lambda path: path.seconds, default=None)


def _arrive(
    best: Mapping[ActivationLayout, list[_Path]],
    wanted: ActivationLayout,
    moved: float,
    moves: _Moves,
    limit: float | None,
) -> list[_Path]:
    """What can lie before a layer: each of these paths has the one that it comes from as ``before``."""
    paths = [
        _Path(path.seconds + seconds, path.num_bytes, wanted.split, path)
        for lying, group in best.items()
        for seconds in (moves.seconds(moved, lying, wanted),)
        for path in group
    ]
    return _pruned({wanted: paths}, limit).get(wanted, [])


def _pruned(groups: Mapping[ActivationLayout, list[_Path]], limit: float | None) -> dict[ActivationLayout, list[_Path]]:
    """Of each group the fastest; where memory counts, those that fit and of which none is both faster and leaner."""
    if limit is None:
        return {lying: [min(paths, key=lambda path: path.seconds)] for lying, paths in groups.items() if paths}
    kept: dict[ActivationLayout, list[_Path]] = {}
    for lying, paths in groups.items():
        front: list[_Path] = []
        for path in sorted(paths, key=lambda path: (path.seconds, path.num_bytes)):
            if path.num_bytes <= limit and (not front or path.num_bytes < front[-1].num_bytes):
                front.append(path)
        if front:
            kept[lying] = front if len(front) <= _MOST_KEPT else _thinned(front)
    return kept


def _thinned(front: Sequence[_Path]) -> list[_Path]:
    """Some of a front, both ends included."""
    places = (round(at * (len(front) - 1) / (_MOST_KEPT - 1)) for at in range(_MOST_KEPT))
    return [front[place] for place in dict.fromkeys(places)]
