"""What a step has before and after its pipeline: gathers of sharded weights, sums of gradients, the update.

A collective ends when the last of its ranks has come and its bytes have moved, less what went on while the last of them still
computed. All ranks wait for each other before the update: its norm, and whether it is finite, are of the whole gradient.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.plan import Plan
from shoal.planner.parts import StepParts
from shoal.planner.simulation.cellprices import FIXED, GATHER, REDUCE, UPDATE
from shoal.schedules.schedule import Schedule

Array = NDArray[np.float64]
Span = tuple[float, float]
Piece = tuple[str, str, float, float]
"""What, name, start, end."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Times from the step's begin."""

    begin: float
    """When the first cells start."""
    end: float
    decides: tuple[int, int]
    """Pipeline place and group of replicas that everybody else waits for."""
    pieces: tuple[Piece, ...]
    """What the step waits for after the last cell of those, in order."""
    reduces: tuple[Span, ...]
    """The sum of gradients, by place; empty spans where there is none."""
    updated_from: float
    """When all have their sums."""
    updates: tuple[tuple[float, ...], ...]
    """When the update ends, by place and group."""
    gathers: tuple[Span, ...]
    """What is left of the gather after the update, by place."""


def play_tail(parts: StepParts, plan: Plan, schedule: Schedule, last: Array, compute: Array, links: Array) -> Tail:
    """The collectives and the update around a pipeline.

    Args:
        parts: what they take.
        plan: which of them come before the first cell.
        schedule: one that flows has them inside its cells.
        last: when the last cell ends, by (place, group), counted from the first start.
        compute: how many times as long a rank takes, by (place, group).
        links: the same of its links.
    """
    if schedule.updates.flows:
        return _nothing(last)
    slowest = links.max(axis=1)
    gathers = _left_over(parts.gather * slowest, parts.gather_hidden, compute)
    comes_first = plan.zero == 3
    begin = float(gathers.max()) if comes_first else 0.0
    ready = begin + last.max(axis=1)
    sums = parts.reduce * slowest
    exposed = _left_over(sums, parts.reduce_hidden, compute)
    summed = ready + exposed
    place = int(summed.argmax())
    group = int(last[place].argmax())
    all_summed = float(summed[place])
    updated = all_summed + parts.update * compute
    after = np.zeros_like(gathers) if comes_first else gathers
    gathered = updated.max(axis=1) + after
    slow = int(gathered.argmax())
    done, until = float(updated[slow].max()), float(gathered[slow])
    end = until + parts.fixed
    return Tail(
        begin=begin,
        end=end,
        decides=(place, group),
        pieces=(
            (REDUCE, "reduce", float(ready[place]), all_summed),
            (UPDATE, "update", all_summed, done),
            (GATHER, "gather", done, until),
            (FIXED, "fixed", until, end),
        ),
        reduces=tuple((float(at - whole), float(at)) for at, whole in zip(summed, sums, strict=True)),
        updated_from=all_summed,
        updates=tuple(tuple(map(float, row)) for row in updated),
        gathers=tuple((float(row.max()), float(at)) for row, at in zip(updated, gathered, strict=True)),
    )


def _left_over(whole: Array, hidden: float, compute: Array) -> Array:
    """What nothing hides, by place: where devices are faster than the data sheet's, less goes on under their passes."""
    found: Array = np.maximum(0.0, whole - hidden * np.minimum(1.0, compute.min(axis=1)))
    return found


def _nothing(last: Array) -> Tail:
    place, group = np.unravel_index(int(last.argmax()), last.shape)
    end = float(last.max())
    return Tail(
        begin=0.0,
        end=end,
        decides=(int(place), int(group)),
        pieces=(),
        reduces=((end, end),) * len(last),
        updated_from=end,
        updates=tuple((end,) * last.shape[1] for _ in last),
        gathers=((end, end),) * len(last),
    )
