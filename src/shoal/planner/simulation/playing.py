"""A schedule worked through for many replicas at once: cells in an order that their needs allow, times as rows of an array.

The rules are those of ``schedules/pricing.py``: ranks work in order, a cell waits for what it needs, and what comes from
another rank comes a transfer later. There one pipeline has one price for each action; here every replica and every step has
its own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.schedules.schedule import Cell, Result, Schedule, made_by, needs_of

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Need:
    """What a cell waits for: another cell, and whether its result has a way to go."""

    cell: int
    """By its number in the order."""
    is_far: bool


@dataclass(frozen=True)
class Step:
    """One cell in the order of work."""

    place: int
    """The pipeline rank that works on it."""
    cell: Cell
    before: int | None
    """The cell that the same rank works on before."""
    needs: tuple[Need, ...]


@dataclass(frozen=True)
class Order:
    """All cells of a schedule, each after everything that it needs."""

    schedule: Schedule
    steps: tuple[Step, ...]
    rows: tuple[tuple[int, ...], ...]
    """The numbers of each rank's cells."""


def order_of(schedule: Schedule) -> Order:
    """The order in which a schedule can be worked through.

    Raises:
        RequestError: it has no end.
    """
    grid = schedule.grid
    made: dict[Result, int] = {}
    steps: list[Step] = []
    rows: list[list[int]] = [[] for _ in schedule.rows]
    moved = True
    while moved:
        moved = False
        for place, row in enumerate(schedule.rows):
            while len(rows[place]) < len(row):
                cell = row[len(rows[place])]
                wanted = [
                    (result, grid.rank_of(action.stage, action.microbatch))
                    for action in cell
                    for result in needs_of(action, grid.num_stages)
                ]
                if any(result not in made for result, _ in wanted):
                    break
                needs = tuple(Need(made[result], grid.rank_of(result[1], result[2]) != own) for result, own in wanted)
                number = len(steps)
                steps.append(Step(place, cell, rows[place][-1] if rows[place] else None, needs))
                rows[place].append(number)
                made.update((result, number) for action in cell for result in made_by(action))
                moved = True
    for place, row in enumerate(schedule.rows):
        if len(rows[place]) < len(row):
            raise RequestError(
                f"schedule {schedule.name}: rank {place} waits for ever at its cell {len(rows[place])}; "
                f"`shoal schedule` shows what it waits for"
            )
    return Order(schedule, tuple(steps), tuple(map(tuple, rows)))


def play(order: Order, durations: Array, transfers: Array) -> tuple[Array, Array]:
    """Starts and ends of all cells.

    Args:
        order: of the schedule.
        durations: of each cell, by (cell, column).
        transfers: from each pipeline rank to another, by (place, column).
    """
    starts, ends = np.empty_like(durations), np.empty_like(durations)
    for number, step in enumerate(order.steps):
        start = ends[step.before] if step.before is not None else np.zeros(durations.shape[1])
        for need in step.needs:
            at = ends[need.cell]
            start = np.maximum(start, at + transfers[order.steps[need.cell].place] if need.is_far else at)
        starts[number] = start
        np.add(start, durations[number], out=ends[number])
    return starts, ends
