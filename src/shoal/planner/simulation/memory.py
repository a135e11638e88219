"""What a rank holds in the course of a step: weights and state throughout, activations from a forward to their last use."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.schedules.player import activation_changes
from shoal.schedules.schedule import Schedule


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
