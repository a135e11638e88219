"""A schedule as a CSV file that ``torch.distributed.pipelining`` reads and writes: one row per rank, one action per cell.

It is torch's "compute only" form: what a rank computes, in order, and no communication. Empty cells are idle slots, which say
nothing about order and are skipped. The file names no shape, so the grid is read off the cells: a rank per row, stages and
microbatches up to the highest that occur, and the fold by where the forwards lie.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.core.errors import RequestError
from shoal.core.pipelines import replica_problems
from shoal.schedules.rules import IllegalSchedule, check
from shoal.schedules.schedule import Action, Cell, Fold, Grid, Kind, Row, Schedule, parse_cell, write_cell

MOST_BYTES = 64 * 2**20
MOST_CELLS = 1_000_000
"""Beyond it a file takes more than a minute and a gigabyte to read."""
_LONGEST_CELL = 64
_COMMUNICATION = ("SEND", "RECV", "SHARD", "REDUCE_GRAD")
_FOLD_RULES = {
    Fold.LINE: "line: stage s on rank s",
    Fold.LOOP: "loop: stage s on rank s mod P",
    Fold.VEE: "vee: down the ranks and back, stage s from P on on rank 2P-1-s",
    Fold.CROSS: "cross: stage s on rank s for the first half of the microbatches and on rank P-1-s for the second",
    Fold.TURNS: "turns: a stage on one or several rows side by side, microbatch m of R rows in the one of number m mod R",
}


def write_csv(schedule: Schedule) -> str:
    """The schedule's rows, without idle slots; who reads them needs to know nothing else of it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([write_cell(cell) for cell in row] for row in schedule.rows)
    return text.getvalue()


def read_csv(text: str, *, name: str, origin: str) -> Schedule:
    """A legal schedule of somebody's own, which ends its step with a flush.

    Args:
        text: of the file.
        name: of the schedule.
        origin: where the text is from, for messages.

    Raises:
        RequestError: it is no schedule, or not a legal one; names the row, the cell and the fix.
    """
    # Before anything is made of it: no fewer than there are cells, empty ones too.
    num_cells = text.count(",") + text.count("\n") + 1
    if num_cells > MOST_CELLS:
        raise RequestError(
            f"{origin} has about {num_cells} cells, and at most {MOST_CELLS} are read; write fewer microbatches, or no idle slots"
        )
    placed = list(_read_cells(text, origin))
    if not placed:
        raise RequestError(f"{origin} has no cells; write a row per rank, such as 0F0,0B0")
    num_ranks = placed[-1].rank + 1
    rows: list[list[Cell]] = [[] for _ in range(num_ranks)]
    for entry in placed:
        rows[entry.rank].append(entry.cell)
    if [] in rows:
        rank = rows.index([])
        raise RequestError(
            f"{origin}, row {rank + 1} has no action, so rank {rank} has no work; fill the row or remove it"
        )
    num_stages = _count(placed, "stage", origin)
    num_microbatches = _count(placed, "microbatch", origin)
    grid = _infer_grid(placed, num_ranks, num_stages, num_microbatches, origin)
    schedule = Schedule(name=name, grid=grid, rows=tuple(Row(row) for row in rows))
    try:
        check(schedule)
    except IllegalSchedule as error:
        # The file's name is enough of a name.
        raise IllegalSchedule(f"{origin}: {str(error).removeprefix(f'schedule {name}: ')}") from error
    return schedule


@dataclass(frozen=True, slots=True)
class _Placed:
    """A cell and where it stood in the file."""

    rank: int
    column: int
    cell: Cell

    def __str__(self) -> str:
        return f"row {self.rank + 1} (rank {self.rank}), cell {self.column + 1}"


def _read_cells(text: str, origin: str) -> Iterator[_Placed]:
    try:
        lines = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True))
    except csv.Error as error:
        raise RequestError(f"{origin} is no CSV: {error}; write cells such as 2F0, separated by commas") from error
    for rank, line in enumerate(lines):
        for column, cell_text in enumerate(line):
            if cell_text.strip():
                where = f"{origin}, row {rank + 1} (rank {rank}), cell {column + 1}"
                yield _Placed(rank, column, _read_cell(cell_text.strip(), where))


def _read_cell(text: str, where: str) -> Cell:
    if len(text) > _LONGEST_CELL:
        raise RequestError(
            f"{where}: {text[:_LONGEST_CELL]!r}... is {len(text)} letters long; write a cell such as 2F0, separated by commas"
        )
    if any(word in text for word in _COMMUNICATION):
        raise RequestError(
            f"{where}: {text!r} is communication, which follows from the rest; write the file without it: torch does with "
            f'_dump_csv(file, format="compute_only")'
        )
    try:
        cell = parse_cell(text)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error
    if len(cell) == 2 and (cell[0].kind is not Kind.FORWARD or cell[1].kind not in (Kind.BACKWARD, Kind.INPUT)):
        raise RequestError(
            f"{where}: {text!r} overlaps {cell[0]} and {cell[1]}; write a forward first and a B or an I second"
        )
    return cell


def _count(placed: list[_Placed], word: str, origin: str) -> int:
    """How many stages or microbatches there are; a number that is left out is a slip of the pen, not a smaller pipeline."""
    numbers: dict[int, tuple[_Placed, Action]] = {}
    for entry in placed:
        for action in entry.cell:
            numbers.setdefault(action.stage if word == "stage" else action.microbatch, (entry, action))
    highest = max(numbers)
    if len(numbers) <= highest:
        missing = next(number for number in range(highest) if number not in numbers)
        entry, action = numbers[highest]
        raise RequestError(
            f"{origin}, {entry}: {action} is of {word} {highest}, and no cell is of {word} {missing}; add its cells, or count "
            f"{'stages' if word == 'stage' else 'microbatches'} from 0 without a gap"
        )
    return highest + 1


def _infer_grid(placed: list[_Placed], num_ranks: int, num_stages: int, num_microbatches: int, origin: str) -> Grid:
    """The fold under which every forward stands in the row of its rank."""
    if num_stages > num_ranks and num_stages % num_ranks:
        highest = next(entry for entry in placed if any(action.stage == num_stages - 1 for action in entry.cell))
        raise RequestError(
            f"{origin}, {highest}: there are {num_stages} stages and {num_ranks} rows, and stages are dealt to ranks evenly; "
            f"write {num_stages} rows, or give every rank as many stages"
        )
    folds = {1: (Fold.LINE, Fold.CROSS), 2: (Fold.LOOP, Fold.VEE)}.get(num_stages // num_ranks, (Fold.LOOP,))
    replicas: tuple[int, ...] = ()
    if num_stages < num_ranks:
        folds, replicas = (Fold.TURNS,), _count_replicas(placed, num_ranks, num_stages, origin)
    wrong: list[tuple[Grid, list[tuple[_Placed, Action]]]] = []
    for fold in folds:
        grid = Grid(fold, num_ranks, num_stages, num_microbatches, replicas)
        misplaced = [
            (entry, action)
            for entry in placed
            for action in entry.cell
            if action.kind is Kind.FORWARD and grid.rank_of(action.stage, action.microbatch) != entry.rank
        ]
        if not misplaced:
            return grid
        wrong.append((grid, misplaced))
    grid, misplaced = min(wrong, key=lambda case: len(case[1]))
    entry, action = misplaced[0]
    rank = grid.rank_of(action.stage, action.microbatch)
    raise RequestError(
        f"{origin}, {entry}: {action} does not lie there in any known fold; the nearest has it in row {rank + 1} (rank {rank}). "
        f"With {num_stages} stages on {num_ranks} ranks there are {'; '.join(_FOLD_RULES[fold] for fold in folds)}"
    )


def _count_replicas(placed: list[_Placed], num_ranks: int, num_stages: int, origin: str) -> tuple[int, ...]:
    """Rows of every stage, each row counted for the stage of its first cell."""
    first: dict[int, tuple[_Placed, int]] = {}
    for entry in placed:
        first.setdefault(entry.rank, (entry, entry.cell[0].stage))
    counts, before = [0] * num_stages, -1
    for rank in range(num_ranks):
        entry, stage = first[rank]
        if stage not in (max(before, 0), before + 1):
            raise RequestError(
                f"{origin}, {entry}: {entry.cell[0]} is of stage {stage}, where stage {max(before, 0)} or {before + 1} is due: "
                f"{num_stages} stages on {num_ranks} rows take turns; write the rows of a stage side by side, stage after stage"
            )
        counts[stage] += 1
        before = stage
    if 0 in counts:
        raise RequestError(
            f"{origin}: no row begins with stage {counts.index(0)}, and there are {num_stages} stages on {num_ranks} rows; give "
            f"every stage one row or several"
        )
    for problem in replica_problems(counts, num_ranks):
        raise RequestError(f"{origin}: {problem}")
    return tuple(counts)
