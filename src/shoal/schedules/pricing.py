"""When every cell of a schedule starts and ends, for given costs: ranks work in order, a cell waits for what it needs.

This is the schedule's own prediction of a step: its length, each rank's idle time, and what a rank holds at its fullest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.core.errors import RequestError
from shoal.schedules.schedule import Action, Cell, Kind, Point, Result, Schedule, made_by, needs_of

_SHORTEST, _LONGEST = 1e-300, 1e300
"""Beyond these, sums of times or a drawing's scale could come to infinity."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the actions of one stage take, in any unit of time."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0
    """From one rank to another, of an activation or of a gradient."""
    overlapped: float | None = None
    """A forward and a backward in one cell; None for their sum, which is what a device without overlap takes."""
    stages: tuple[float, ...] | None = None
    """How many times as long each stage takes; None for stages of one size."""
    measured: Mapping[Action, float] | None = None
    """What every single action takes, in place of all of the above but ``transfer``: for times that were taken from a run."""

    def __post_init__(self) -> None:
        values = {"forward": self.forward, "input": self.input, "weight": self.weight, "transfer": self.transfer}
        if self.overlapped is not None:
            values["overlapped"] = self.overlapped
        for name, value in values.items():
            if value != 0 and not _SHORTEST <= value <= _LONGEST:
                raise RequestError(
                    f"the cost of {name} is {value:g}; give a number that is not negative: 0, or {_SHORTEST:g} to {_LONGEST:g}"
                )

    def of(self, cell: Cell) -> float:
        """What a cell takes."""
        if len(cell) == 2 and self.overlapped is not None:
            return self.overlapped * max(self._size(action) for action in cell)
        if self.measured is not None:
            return sum(self.measured[action] for action in cell)
        return sum(self._of_action(action) for action in cell)

    def _of_action(self, action: Action) -> float:
        parts = {
            Kind.FORWARD: self.forward,
            Kind.INPUT: self.input,
            Kind.WEIGHT: self.weight,
            Kind.BACKWARD: self.input + self.weight,
        }
        return parts[action.kind] * self._size(action)

    def _size(self, action: Action) -> float:
        return 1.0 if self.stages is None else self.stages[action.stage]


Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A schedule in time."""

    spans: tuple[tuple[Span, ...], ...]
    """Start and end of every cell, by rank."""
    stuck: tuple[int | None, ...]
    """The cell at which a rank waits for ever, by rank; None for ranks that come to their end."""

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((row[-1][1] for row in self.spans if row), default=0.0)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return sum(end - start for start, end in self.spans[rank])

    def idle_in_own_span(self, rank: int) -> float:
        """Time that a rank waits between its first cell and its last."""
        row = self.spans[rank]
        return row[-1][1] - row[0][0] - self.busy(rank) if row else 0.0

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle, from the first start to the last end."""
        total = self.makespan * len(self.spans)
        return 1.0 - sum(map(self.busy, range(len(self.spans)))) / total if total else 0.0

    @property
    def bubble_in_own_span(self) -> float:
        """Share of each rank's own span, first cell to last, that is idle, over all ranks."""
        idle = sum(map(self.idle_in_own_span, range(len(self.spans))))
        total = idle + sum(map(self.busy, range(len(self.spans))))
        return idle / total if total else 0.0


def price(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Work through the rows; ranks that can never go on are in ``stuck``."""
    costs = costs or Costs()
    grid = schedule.grid
    ready: dict[Result, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    free = [0.0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while len(spans[rank]) < len(row):
                cell = row[len(spans[rank])]
                start = _start(cell, free[rank], ready, costs, schedule)
                if start is None:
                    break
                free[rank] = start + costs.of(cell)
                spans[rank].append((start, free[rank]))
                ready.update((result, free[rank]) for action in cell for result in made_by(action))
                moved = True
    stuck = tuple(len(done) if len(done) < len(row) else None for done, row in zip(spans, schedule.rows, strict=True))
    assert len(spans) == grid.num_ranks
    return Timeline(spans=tuple(map(tuple, spans)), stuck=stuck)


def _start(cell: Cell, free: float, ready: Mapping[Result, float], costs: Costs, schedule: Schedule) -> float | None:
    """When a cell can start; None while something that it needs is not there."""
    start = free
    grid = schedule.grid
    for action in cell:
        own = grid.rank_of(action.stage, action.microbatch)
        for result in needs_of(action, grid.num_stages):
            at = ready.get(result)
            if at is None:
                return None
            far = grid.rank_of(result[1], result[2]) != own
            start = max(start, at + (costs.transfer if far else 0.0))
    return start


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Microbatches of one stage that each rank holds at its fullest: from their forward until their weights' gradient."""
    return tuple(_peak(schedule.actions(rank)) for rank in range(len(schedule.rows)))


def peak_activations_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The same of each stage alone, on that of its ranks that holds more. The stages of a rank need not be fullest at once."""
    peaks = [0] * schedule.grid.num_stages
    for rank in range(len(schedule.rows)):
        for stage in schedule.grid.stages_of(rank):
            own = _peak(action for action in schedule.actions(rank) if action.stage == stage)
            peaks[stage] = max(peaks[stage], own)
    return tuple(peaks)


def _peak(actions: Iterable[Action]) -> int:
    held = peak = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif any(point is Point.WEIGHTS for point, _, _ in made_by(action)):
            held -= 1
    return peak
