"""What each pipeline rank does, in order, as data.

One value, four readers: the runtime executes it, ``pricing`` prices it, ``rules`` prove it legal, ``draw`` and ``svg`` show it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from shoal.schedules.action import Action, Cell, Kind
from shoal.schedules.grid import Grid

Row = tuple[Cell, ...]


class Updates(StrEnum):
    """When weights change, and which version of them a microbatch sees."""

    FLUSH = "flush"
    """Once, when all microbatches are done: what one process does."""
    STASHED = "stashed"
    """After every microbatch's backward; that backward uses the weights of its forward on this stage (PipeDream)."""
    VERTICAL = "vertical"
    """After every microbatch's backward; a microbatch uses on all stages the version that it met on the first (vertical sync)."""
    BUFFERED = "buffered"
    """After every ``accumulate`` microbatches, without a flush; they use the version before the newest (2BW)."""

    @property
    def flows(self) -> bool:
        """True when the next step's microbatches enter while this step's are still on their way."""
        return self is not Updates.FLUSH


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The cells of every rank, in the order in which the rank works on them."""

    name: str
    grid: Grid
    rows: tuple[Row, ...]
    updates: Updates = Updates.FLUSH
    accumulate: int = 1
    """Microbatches per update where weights change without a flush."""
    activation_bound: tuple[int, ...] | None = None
    """Microbatches of one stage that a rank may hold at once, by rank; None where the family promises nothing."""
    version_bound: tuple[int, ...] | None = None
    """Versions of its weights that a rank may hold at once, by rank."""

    @property
    def splits_backward(self) -> bool:
        """True when some backward is cut into its input and weight parts."""
        return any(action.kind is Kind.INPUT for row in self.rows for cell in row for action in cell)

    def actions(self, rank: int) -> Iterator[Action]:
        """A rank's actions; those that overlap one after the other."""
        for cell in self.rows[rank]:
            yield from cell


class Point(StrEnum):
    """What an action leaves behind for others."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    """Of the stage's input."""
    WEIGHTS = "weights"
    """The gradient of the stage's weights; the microbatch's activations are free."""


Result = tuple[Point, int, int]
"""A point of a stage and a microbatch."""

_MADE = {
    Kind.FORWARD: (Point.OUTPUT,),
    Kind.INPUT: (Point.GRADIENT,),
    Kind.WEIGHT: (Point.WEIGHTS,),
    Kind.BACKWARD: (Point.GRADIENT, Point.WEIGHTS),
}


def made_by(action: Action) -> tuple[Result, ...]:
    """What is there once this action is done."""
    return tuple((point, action.stage, action.microbatch) for point in _MADE[action.kind])


def needs_of(action: Action, num_stages: int) -> tuple[Result, ...]:
    """What must be there before this action: results of its own rank, and what other ranks send."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return ((Point.OUTPUT, stage - 1, microbatch),) if stage else ()
    if action.kind is Kind.WEIGHT:
        return ((Point.GRADIENT, stage, microbatch),)
    own = (Point.OUTPUT, stage, microbatch)
    return (own,) if stage == num_stages - 1 else (own, (Point.GRADIENT, stage + 1, microbatch))
