"""The price of a schedule for given costs of its actions, and a report of it for the command line and for programs.

This is the schedule's own prediction of a step: its length, each rank's idle time, and what a rank holds at its fullest.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.core.errors import RequestError
from shoal.schedules.player import Timeline, order_cells, peak_activations, play, timeline_of
from shoal.schedules.schedule import Action, Cell, Kind, Schedule, write_cell
from shoal.schedules.versions import peak_versions

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


def price(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When every cell of a legal schedule starts and ends."""
    costs = costs or Costs()
    order = order_cells(schedule)
    durations = [costs.of(each.cell) for each in order.cells]
    starts, ends = play(order, durations, [costs.transfer] * len(order.rows), begin=0.0, later=max)
    return timeline_of(order, starts, ends)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank of a schedule."""

    rank: int
    stages: tuple[int, ...]
    """The stages that it works on."""
    busy: float
    idle: float
    """From the schedule's first start to its last end."""
    peak_activations: int
    """Most microbatches of one stage that it holds at once."""
    versions: int
    """Most versions of its weights that it holds at once."""
    weight_copies: int
    """Stages whose weights it holds; a cross holds the model twice."""


@dataclass(frozen=True, kw_only=True)
class TimedCell:
    """A cell as text, and when it is worked on."""

    cell: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """A schedule under given costs."""

    name: str
    ranks: int
    stages: int
    microbatches: int
    chunks: int
    """Stages per rank."""
    replicas: tuple[int, ...]
    """Ranks that hold each stage."""
    fold: str
    updates: str
    costs: Costs
    makespan: float
    bubble: float
    """Share of all ranks' time that is idle, from the first start to the last end."""
    bubble_in_own_span: float
    """Share of each rank's own span, first cell to last, that is idle."""
    per_rank: tuple[RankReport, ...]
    rows: tuple[tuple[TimedCell, ...], ...]

    def as_values(self) -> dict[str, Any]:
        """Plain values, in the order of the fields, for JSON."""
        return asdict(self)


def build_report(schedule: Schedule, timeline: Timeline, costs: Costs) -> Report:
    """Put together what the other files of this room compute."""
    grid = schedule.grid
    activations, versions = peak_activations(schedule), peak_versions(schedule)
    held = [grid.stages_of(rank) for rank in range(grid.num_ranks)]
    return Report(
        name=schedule.name,
        ranks=grid.num_ranks,
        stages=grid.num_stages,
        microbatches=grid.num_microbatches,
        chunks=grid.chunks,
        replicas=tuple(len(grid.ranks_of(stage)) for stage in range(grid.num_stages)),
        fold=grid.fold.value,
        updates=schedule.updates.value,
        costs=costs,
        makespan=timeline.makespan,
        bubble=timeline.bubble,
        bubble_in_own_span=timeline.bubble_in_own_span,
        per_rank=tuple(
            RankReport(
                rank=rank,
                stages=held[rank],
                busy=timeline.busy(rank),
                idle=timeline.makespan - timeline.busy(rank),
                peak_activations=activations[rank],
                versions=versions[rank],
                weight_copies=len(held[rank]),
            )
            for rank in range(grid.num_ranks)
        ),
        rows=tuple(
            tuple(
                TimedCell(cell=write_cell(cell), start=start, end=end)
                for cell, (start, end) in zip(row, spans, strict=True)
            )
            for row, spans in zip(schedule.rows, timeline.spans, strict=True)
        ),
    )
