"""What a schedule costs, as one value: for the table of the command line and for programs."""

from dataclasses import asdict, dataclass
from typing import Any

from shoal.schedules.pricing import Costs, Timeline, peak_activations
from shoal.schedules.schedule import Schedule, write_cell
from shoal.schedules.versions import peak_versions


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
