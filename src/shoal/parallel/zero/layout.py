"""Where every element of a sharded model lies: units, offsets and cuts, as plain numbers. No process and no memory is needed.

A unit is what is gathered and reduced together: a block, an embedding or linear layer outside the blocks, or all that is left.

    unit     | wq ........ | wk ..... | wv ..... | norm |      parameters in the order of names, each starting at a multiple of 16
    ranks    | 0 ................ | 1 ................. |      cut at the start of a row, nearest to the even share
    shard 1                       | wk | wv ..... | norm |      what rank 1 keeps: whole rows, in one slice

torch's ``fully_shard`` cuts each parameter by itself into ``ceil(rows / ranks)`` rows, so every parameter is padded, its elements
change places when it is gathered, and a shard may begin where an optimizer kernel rounds differently. Here a unit is cut once,
its elements are already in their places when they arrive, and a cut lies at a multiple of ``CUT_MULTIPLE`` elements from the
start of its tensor: there every kernel and every sum over a row gives the bits that it gives in one process.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from shoal.core.placement import Shape
from shoal.optim.flat import CUT_MULTIPLE, align
from shoal.parallel.analysis.structure import ModuleAnalysis

ROOT = ""
"""Path of the unit that holds what no block and no layer of its own holds."""
_LEAVES = (nn.Embedding, nn.Linear)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter of a unit."""

    name: str
    shape: Shape
    offset: int
    """Elements from the start of the unit."""
    cuts: tuple[int, ...]
    """Rows at which it is cut: rank r holds rows ``cuts[r]`` to ``cuts[r + 1]``."""

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one row; a tensor without dims is one row."""
        return math.prod(self.shape[1:])

    def rows(self, rank: int) -> tuple[int, int]:
        """First row and end of the rows that a rank holds."""
        return self.cuts[rank], self.cuts[rank + 1]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered and reduced together."""

    path: str
    slots: tuple[Slot, ...]
    counts: tuple[int, ...]
    """Elements of each rank's shard, with the padding between its parameters."""
    is_block: bool
    """True for a block of a stack, which may be recomputed; False for a single layer and for the root."""

    @property
    def size(self) -> int:
        """Elements of all shards together."""
        return sum(self.counts)

    def start(self, rank: int) -> int:
        """Elements before a rank's shard."""
        return sum(self.counts[:rank])

    def local_offset(self, slot: Slot, rank: int) -> int:
        """Where the rank's rows of a slot start in its shard."""
        return slot.offset + slot.rows(rank)[0] * slot.row - self.start(rank)


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A module that must find whole weights when it is called."""

    path: str
    units: tuple[int, ...]
    """The units it reads: its own, and those of weights that it shares with modules before it."""
    reads_in_backward: bool
    """False for an embedding, whose backward pass needs the indices only."""


@dataclass(frozen=True, kw_only=True)
class ZeroLayout:
    """All units of a model, in the order in which a forward pass comes to them; the root, which it holds throughout, first."""

    units: tuple[Unit, ...]
    num_ranks: int
    visits: tuple["Visit", ...]
    """Modules that need units when they are called, in the order of the model."""

    @property
    def size(self) -> int:
        """Elements of the whole model, with padding."""
        return sum(unit.size for unit in self.units)

    def shard_size(self, rank: int) -> int:
        """Elements of a rank's shards of all units, with padding."""
        return sum(unit.counts[rank] for unit in self.units)

    def whole_starts(self) -> list[int]:
        """Where each unit starts in a buffer of whole units."""
        return [0, *accumulate(unit.size for unit in self.units)][:-1]

    def shard_starts(self, rank: int) -> list[int]:
        """Where each unit's shard starts in a rank's buffer of shards."""
        return [0, *accumulate(unit.counts[rank] for unit in self.units)][:-1]

    def capacities(self) -> tuple[int, ...]:
        """The size of the buffer that each unit is gathered into: one size for blocks, one for single layers.

        Two sizes and not one per unit: a model whose layers are all different would otherwise keep a buffer for each of them.
        """
        blocks = max((unit.size for unit in self.units if unit.is_block), default=0)
        layers = max((unit.size for unit in self.units if not unit.is_block and unit.path != ROOT), default=0)
        kinds = {True: blocks, False: layers}
        return tuple(unit.size if unit.path == ROOT else kinds[unit.is_block] for unit in self.units)

    @property
    def root(self) -> int | None:
        """The index of the root unit; None when every parameter has a unit of its own."""
        return 0 if self.units and self.units[0].path == ROOT else None


def lay_out(model: nn.Module, analysis: ModuleAnalysis, num_ranks: int) -> ZeroLayout:
    """The layout of a model's trainable parameters; parameters that are not trained stay whole on every rank."""
    blocks = {path for stack in analysis.stacks for path in stack.blocks}
    outside = analysis.read_outside
    paths = _unit_paths(model, blocks, outside)
    owners: dict[int, str] = {}
    members: dict[str, dict[str, Shape]] = {path: {} for path in (ROOT, *paths)}
    # `named_parameters` gives a tied parameter once, under its first name.
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner = next((path for path in paths if _is_inside(name, path) and name not in outside), ROOT)
            members[owner][name] = tuple(parameter.shape)
            owners[id(parameter)] = owner
    units = tuple(_lay_out_unit(path, shapes, num_ranks, path in blocks) for path, shapes in members.items() if shapes)
    index = {unit.path: place for place, unit in enumerate(units)}
    visits = []
    for path in paths:
        module = model.get_submodule(path)
        read = {owners[id(parameter)] for parameter in module.parameters() if id(parameter) in owners}
        # The root is held throughout the forward pass, so no visit asks for it.
        needed = tuple(sorted(index[owner] for owner in read if owner != ROOT))
        if needed:
            reads_in_backward = type(module) is not nn.Embedding
            visits.append(Visit(path=path, units=needed, reads_in_backward=reads_in_backward))
    return ZeroLayout(units=units, num_ranks=num_ranks, visits=tuple(visits))


def owned_elements(layout: ZeroLayout) -> list[dict[str, tuple[int, int]]]:
    """For each rank, the first element and the end of what it holds of each parameter."""
    slots = [slot for unit in layout.units for slot in unit.slots]
    return [
        {slot.name: (slot.rows(rank)[0] * slot.row, slot.rows(rank)[1] * slot.row) for slot in slots}
        for rank in range(layout.num_ranks)
    ]


def _unit_paths(model: nn.Module, blocks: Set[str], outside: Set[str]) -> list[str]:
    """Paths of the modules that have a unit, in the order of the model; none lies inside another.

    A layer whose weight is read while it does not run has none: its weight is the root's, which is there throughout.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        if not path or (found and _is_inside(path, found[-1])):
            continue
        # The exact types: a subclass may be read by its parent without ever being called, as in `nn.MultiheadAttention`.
        is_read_outside = any(f"{path}.{name}" in outside for name, _ in module.named_parameters())
        if path in blocks or (type(module) in _LEAVES and not is_read_outside):
            found.append(path)
    return found


def _is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith(path + ".")


def _lay_out_unit(path: str, shapes: Mapping[str, Shape], num_ranks: int, is_block: bool) -> Unit:
    names = sorted(shapes)
    *offsets, size = [0, *accumulate(align(math.prod(shapes[name])) for name in names)]
    tensors = [(offset, shapes[name]) for offset, name in zip(offsets, names, strict=True)]
    cuts = [0]
    for rank in range(1, num_ranks):
        cuts.append(max(cuts[-1], _nearest_cut(tensors, size, size * rank / num_ranks)))
    cuts.append(size)
    slots = [
        Slot(name=name, shape=shapes[name], offset=offset, cuts=_row_cuts(shapes[name], offset, cuts))
        for offset, name in zip(offsets, names, strict=True)
    ]
    counts = tuple(stop - start for start, stop in itertools.pairwise(cuts))
    return Unit(path=path, slots=tuple(slots), counts=counts, is_block=is_block)


def _nearest_cut(tensors: Sequence[tuple[int, Shape]], size: int, target: float) -> int:
    """The legal place nearest to ``target``: the start of a tensor, or of a row at a multiple of ``CUT_MULTIPLE`` elements."""
    candidates = [size]
    for offset, shape in tensors:
        candidates.append(offset)
        row, num_rows = math.prod(shape[1:]), shape[0] if shape else 1
        if not row:
            continue
        # The least number of rows whose elements are a multiple of CUT_MULTIPLE.
        stride = CUT_MULTIPLE // math.gcd(row, CUT_MULTIPLE)
        below = min(max(int((target - offset) // (row * stride)), 0), num_rows // stride) * stride
        candidates += [offset + rows * row for rows in (below, below + stride) if rows < num_rows]
    return min(candidates, key=lambda place: (abs(place - target), place))


def _row_cuts(shape: Shape, offset: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Where the unit's cuts fall in one tensor, in rows; padding behind a tensor belongs to the rank with its last row."""
    num_rows, row = shape[0] if shape else 1, math.prod(shape[1:])
    if not row:
        return (0, *[num_rows] * (len(cuts) - 1))
    # Rounded up: a cut in the padding behind the tensor comes after all its rows.
    return tuple(min(max(-((offset - cut) // row), 0), num_rows) for cut in cuts)


def next_visit(layout: ZeroLayout, number: int) -> tuple[int, ...]:
    """The units of the visit that follows in the order of the model: what is gathered ahead in a forward pass."""
    return layout.visits[number + 1].units if number + 1 < len(layout.visits) else ()


def backward_visits(layout: ZeroLayout, calls: Sequence[tuple[int, bool]]) -> list[tuple[int, ...]]:
    """The units that a backward pass reads, visit by visit, after a forward pass with these calls.

    A call is a visit's number, and whether autograd saved weights in it; a block is gathered anyway, before its backward pass.
    """
    return [
        layout.visits[number].units
        for number, reads in reversed(calls)
        if reads or any(layout.units[index].is_block for index in layout.visits[number].units)
    ]


@dataclass
class _Buffer:
    capacity: int
    occupant: int | None = None
    is_taken: bool = False


class Pool:
    """Which buffer a gathered unit takes: the policy alone, without memory, so that a plan's traffic can be forecast.

    Buffers have a few sizes, are made when they are first needed and never given back. Every rank makes the same choices. A unit
    that is let go stays where it was until its buffer is wanted, and taking it again is then free: the last block and the output
    layer, which the backward pass wants first, are not gathered twice, and neither is an embedding tied to the output layer.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        """``capacities`` says for each unit the size of the buffer that it takes."""
        self._capacities = capacities
        # Least recently let go first: what is wanted again soonest is what was let go last.
        self._buffers: dict[int, _Buffer] = {}

    @property
    def sizes(self) -> list[int]:
        """Elements of every buffer made so far, in the order in which they were made."""
        return [self._buffers[index].capacity for index in sorted(self._buffers)]

    def take(self, unit: int) -> tuple[int, bool]:
        """The buffer that holds the unit from now on, and whether its contents are already there."""
        capacity, free = self._capacities[unit], None
        for index, buffer in self._buffers.items():
            if buffer.occupant == unit:
                assert not buffer.is_taken
                buffer.is_taken = True
                return index, True
            if free is None and not buffer.is_taken and buffer.capacity == capacity:
                free = index
        if free is None:
            free = len(self._buffers)
            self._buffers[free] = _Buffer(capacity=capacity)
        buffer = self._buffers[free]
        buffer.occupant, buffer.is_taken = unit, True
        return free, False

    def let_go(self, index: int) -> None:
        """The buffer may be taken by another unit now."""
        buffer = self._buffers.pop(index)
        buffer.is_taken = False
        self._buffers[index] = buffer

    def occupant(self, index: int) -> int | None:
        """The unit whose contents are in the buffer."""
        return self._buffers[index].occupant

    def forget(self) -> None:
        """The weights have changed: nothing in the buffers is worth keeping, except in those that are taken."""
        for buffer in self._buffers.values():
            if not buffer.is_taken:
                buffer.occupant = None
