"""What every cell of a schedule takes on a device of the data sheet, and how that grows on a slower device or link.

A cell computes, and communicates along ``tp``, ``cp`` and ``ep`` where nothing hides it (``StageTimes.exposed``). Slow
devices lengthen the one, slow links the other. Where weights change without a flush, the cell that ends an update has that
update in it; where a software waits for transfers between stages, so have passes.

A rank holds weights and state throughout a step, and activations from a forward to their last use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.planner.pricing.cost import StageTimes, StepParts
from shoal.planner.simulation.conditions import Array
from shoal.schedules.player import Order, activation_changes, play
from shoal.schedules.schedule import Kind, Schedule, frees_activations

COMPUTE, UPDATE, REDUCE, GATHER, TRANSFER, FIXED = "compute", "update", "dp", "zero", "pp", "fixed"
CODEC = "codec"
"""What a step's time goes to, beside the axes of ``StageTimes.exposed``."""


@dataclass(frozen=True, eq=False)
class CellTimes:
    """By cell, in the order of work."""

    places: NDArray[np.int64]
    """The pipeline rank of each."""
    compute: Array
    update: Array
    links: Mapping[str, Array]
    """Communication that nothing hides, by axis."""
    total: Array
    """All of it, on devices and links of the data sheet."""

    def durations(self, compute_factors: Array, link_factors: Array) -> Array:
        """By (cell, column), for factors by (place, column)."""
        slower = (self.compute + self.update)[:, None] * (compute_factors[self.places] - 1.0)
        delayed = sum(self.links.values(), np.zeros_like(self.total))[:, None] * (link_factors[self.places] - 1.0)
        # The total first: where nothing is slow, a cell takes exactly what it was priced at.
        return self.total[:, None] + slower + delayed

    def busy(self, compute_factors: Array, link_factors: Array) -> Array:
        """Seconds of all cells of a rank, by (place, column): sums of each place, because times are linear in the factors."""
        links = sum(self.links.values(), np.zeros_like(self.total))
        places = len(compute_factors)
        totals, compute, delayed = (
            np.bincount(self.places, weights=seconds, minlength=places)[:, None]
            for seconds in (self.total, self.compute + self.update, links)
        )
        found: Array = totals + compute * (compute_factors - 1.0) + delayed * (link_factors - 1.0)
        return found

    def split(self, cell: int, compute_factor: float, link_factor: float) -> dict[str, float]:
        """What one cell's time goes to."""
        found = {COMPUTE: float(self.compute[cell]) * compute_factor, UPDATE: float(self.update[cell]) * compute_factor}
        for axis, seconds in self.links.items():
            found[axis] = float(seconds[cell]) * link_factor
        return {what: seconds for what, seconds in found.items() if seconds}


def time_cells(order: Order, parts: StepParts) -> CellTimes:
    """The price of every cell of a schedule."""
    axes = sorted({axis for stage in parts.stages for axis in stage.exposed})
    links = {axis: np.zeros(len(order.cells)) for axis in axes}
    totals = np.zeros(len(order.cells))
    for number, each in enumerate(order.cells):
        for action in each.cell:
            stage = parts.stages[action.stage]
            seconds = time_of(stage, action.kind)
            totals[number] += seconds
            whole = stage.forward + stage.backward
            for axis, exposed in stage.exposed.items():
                links[axis][number] += exposed * seconds / whole if whole else 0.0
    compute = np.maximum(0.0, totals - sum(links.values(), np.zeros_like(totals)))
    updates = np.zeros_like(totals)
    if order.schedule.updates.are_asynchronous:
        exposed_sum = max(0.0, parts.reduce - parts.reduce_hidden)
        for number in _update_cells(order):
            updates[number] = parts.update
            links.setdefault(REDUCE, np.zeros_like(totals))[number] = exposed_sum
            totals[number] += parts.update + exposed_sum
    moved = parts.transfer - parts.delay
    if moved:
        # One for each pass, as ``transfers.stages_with_transfers`` has it; a weight's gradient stays where it is.
        passes = [sum(action.kind is not Kind.WEIGHT for action in each.cell) for each in order.cells]
        links[TRANSFER] = np.array(passes) * moved
        totals += links[TRANSFER]
    places = np.array([cell.rank for cell in order.cells], dtype=np.int64)
    return CellTimes(places, compute, updates, links, totals)


def play_columns(order: Order, durations: Array, transfers: Array) -> tuple[Array, Array]:
    """Starts and ends by (cell, column), for durations by (cell, column) and transfers from each place by (place, column)."""
    begin: Array = np.zeros(durations.shape[1])
    starts, ends = play(order, list(durations), list(transfers), begin=begin, later=np.maximum)
    return np.stack(starts), np.stack(ends)


def time_of(stage: StageTimes, kind: Kind) -> float:
    """What one kind of action takes on a stage."""
    parts = {Kind.FORWARD: stage.forward, Kind.INPUT: stage.input, Kind.WEIGHT: stage.weight}
    return stage.backward if kind is Kind.BACKWARD else parts[kind]


def _update_cells(order: Order) -> list[int]:
    """The cells after which a rank updates its weights, where it does not wait for a flush."""
    found = []
    for row in order.rows:
        done = 0
        for number in row:
            for action in order.cells[number].cell:
                if frees_activations(action):
                    done += 1
                    if done % order.schedule.accumulate == 0:
                        found.append(number)
    return found


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes on a rank of one pipeline place."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    """Buffers, working space, what the allocator keeps: there throughout the step."""

    @property
    def constant(self) -> float:
        """What is there whatever is worked on."""
        return self.weights + self.gradients + self.optimizer + self.other


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What a step needs, for every pipeline place and stage."""

    places: tuple[RankBytes, ...]
    activations: tuple[float, ...]
    """Of one microbatch, by stage, on one rank."""


Moment = tuple[float, float]
"""A time, and the bytes that are held from then on."""


def memory_timeline(
    schedule: Schedule, place: int, spans: Sequence[tuple[float, float]], needed: StepBytes
) -> tuple[Moment, ...]:
    """How the bytes of a rank go up and down.

    Args:
        schedule: that is worked through.
        place: the pipeline rank.
        spans: start and end of each of its cells.
        needed: the bytes.
    """
    held = needed.places[place].constant
    moments = [(0.0, held)]
    for index, action, comes in activation_changes(schedule.rows[place]):
        change = needed.activations[action.stage]
        if change:
            held += change if comes else -change
            moments.append((spans[index][0 if comes else 1], held))
    return tuple(moments)


def peak_bytes(schedule: Schedule, place: int, needed: StepBytes) -> float:
    """The most that a rank holds at once. It works in order, so this does not depend on how fast anybody is."""
    idle = [(0.0, 0.0)] * len(schedule.rows[place])
    return max(held for _, held in memory_timeline(schedule, place, idle, needed))
