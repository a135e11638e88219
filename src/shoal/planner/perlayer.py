"""Which dims each layer is split along, for chains whose layers are not alike: dynamic programming over the chain.

A layer on N devices may be split by samples (dp), by parameters (tp), by an attribute of a sample, which is its positions or the
rows of an image (cp), and be left to a part of the devices, in any degrees whose product is N (``splits.py``). Going from one
split to another costs a redistribution of the activation in between. The recursion is Galvatron's (Miao et al. 2023,
arXiv:2211.13878, eq. 1); its memory axis is exact here: ways that are neither faster nor leaner than another are dropped.

Branches that could run at the same time on different devices, FlexFlow's other use of the operator dim, are not known: a traced
module is a chain, in the order in which it ran.

Shoal executes one split for all layers; what this finds is how much a split of each layer's own could gain at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.costs.layers import Layer, ModelCosts
from shoal.planner.job import Job
from shoal.planner.splits import Lying, Split, Way, redistribute, ways_of

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


def choose_splits(job: Job, *, num_devices: int | None = None) -> Choices | None:
    """The fastest split of every layer that fits, redistributions included; None where no one split for all layers fits.

    Args:
        job: what is trained, and on what; one microbatch is the whole batch.
        num_devices: of the job's cluster, when it is not all of them.
    """
    devices = num_devices or job.cluster.num_devices
    limit = job.cluster.device.free_bytes
    tables = [ways_of(job, layer, devices) for layer in job.chain.distinct]
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
        self._known: dict[tuple[float, Lying, Lying], float] = {}

    def seconds(self, num_bytes: float, old: Lying, new: Lying) -> float:
        if old == new:
            return 0.0
        key = (num_bytes, old, new)
        if key not in self._known:
            self._known[key] = redistribute(self._job, num_bytes, old, new)
        return self._known[key]


def _best_uniform(layers: Sequence[Layer], rows: Sequence[Sequence[Way]], moves: _Moves, limit: float) -> _Path | None:
    shared = set.intersection(*({way.split for way in row} for row in rows))
    found = []
    for split in sorted(shared):
        path = _shortest(layers, [[way for way in row if way.split == split] for row in rows], moves, limit=None)
        if path is not None and path.num_bytes <= limit:
            found.append(path)
    return min(found, key=lambda path: path.seconds, default=None)


def _shortest(
    layers: Sequence[Layer], rows: Sequence[Sequence[Way]], moves: _Moves, *, limit: float | None
) -> _Path | None:
    """The fastest of all assignments, or of those that fit."""
    first: dict[Lying, list[_Path]] = {}
    for way in rows[0]:
        path = _Path(way.seconds, way.num_bytes, way.split, None)
        first.setdefault(Lying(way.split, way.gives_shards), []).append(path)
    best = _pruned(first, limit)
    for at in range(1, len(rows)):
        moved = layers[at - 1].output_bytes
        # Ways that want their input alike share the look at where it may come from.
        arrived: dict[Lying, list[_Path]] = {}
        further: dict[Lying, list[_Path]] = {}
        for way in rows[at]:
            wanted = Lying(way.split, way.takes_shards)
            if wanted not in arrived:
                arrived[wanted] = _arrive(best, wanted, moved, moves, limit)
            further.setdefault(Lying(way.split, way.gives_shards), []).extend(
                _Path(path.seconds + way.seconds, path.num_bytes + way.num_bytes, way.split, path.before)
                for path in arrived[wanted]
            )
        best = _pruned(further, limit)
    ended = []
    for lying, paths in best.items():
        # What comes out of the last layer is whole.
        extra = moves.seconds(layers[-1].output_bytes, lying, Lying(lying.split, False)) if lying.is_sharded else 0.0
        ended += [_Path(path.seconds + extra, path.num_bytes, path.split, path.before) for path in paths]
    return min(ended, key=lambda path: path.seconds, default=None)


def _arrive(
    best: Mapping[Lying, list[_Path]], wanted: Lying, moved: float, moves: _Moves, limit: float | None
) -> list[_Path]:
    """What can lie before a layer: each of these paths has the one that it comes from as ``before``."""
    paths = [
        _Path(path.seconds + seconds, path.num_bytes, wanted.split, path)
        for lying, group in best.items()
        for seconds in (moves.seconds(moved, lying, wanted),)
        for path in group
    ]
    return _pruned({wanted: paths}, limit).get(wanted, [])


def _pruned(groups: Mapping[Lying, list[_Path]], limit: float | None) -> dict[Lying, list[_Path]]:
    """Of each group the fastest; where memory counts, those that fit and of which none is both faster and leaner."""
    if limit is None:
        return {lying: [min(paths, key=lambda path: path.seconds)] for lying, paths in groups.items() if paths}
    kept: dict[Lying, list[_Path]] = {}
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
