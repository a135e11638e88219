"""The one clock of a schedule: when each cell starts and ends, for durations that the caller gives.

Ranks work through their cells in order. A cell starts when its rank is free and everything that it needs is there; a result of
another rank arrives one transfer later. The caller says what cells and transfers take: a unit each (``pricing``), seconds on a
cluster with one column for each replica (``planner/simulation``), or work on cores that the ranks of one machine share
(``planner/pricing/local``). What these read off the times (bubble, critical path, activations held) is here too.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from shoal.core.errors import RequestError
from shoal.schedules.schedule import Action, Cell, Kind, Result, Row, Schedule, frees_activations, made_by, needs_of


class Need(NamedTuple):
    """What a cell waits for: another cell, and whether its result comes from another rank."""

    cell: int
    """By its number in the order."""
    is_far: bool


class OrderedCell(NamedTuple):
    """One cell in the order of work."""

    rank: int
    cell: Cell
    previous: int | None
    """The cell that the same rank works on before."""
    needs: tuple[Need, ...]


@dataclass(frozen=True)
class Order:
    """The cells of a schedule, each after everything that it needs."""

    schedule: Schedule
    cells: tuple[OrderedCell, ...]
    rows: tuple[tuple[int, ...], ...]
    """The numbers of each rank's cells."""


def order_cells(schedule: Schedule) -> Order:
    """The cells in an order that their needs allow.

    Raises:
        RequestError: some rank waits for ever.
    """
    order = _walk(schedule)
    for rank, index in _stuck(order).items():
        raise RequestError(
            f"schedule {schedule.name}: rank {rank} waits for ever at its cell {index}; `shoal schedule` shows what it waits for"
        )
    return order


def find_stuck(schedule: Schedule) -> dict[int, int]:
    """The ranks that never come to their end, each with the index of the cell at which it waits for ever."""
    return _stuck(_walk(schedule))


def _stuck(order: Order) -> dict[int, int]:
    pairs = zip(order.rows, order.schedule.rows, strict=True)
    return {rank: len(done) for rank, (done, row) in enumerate(pairs) if len(done) < len(row)}


def _walk(schedule: Schedule) -> Order:
    """Every cell that some rank comes to, each after everything that it needs."""
    num_stages = schedule.grid.num_stages
    made: dict[Result, int] = {}
    cells: list[OrderedCell] = []
    rows: list[list[int]] = [[] for _ in schedule.rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while len(rows[rank]) < len(row):
                cell = row[len(rows[rank])]
                makers = [made.get(result) for action in cell for result in needs_of(action, num_stages)]
                if None in makers:
                    break
                needs = tuple(Need(maker, cells[maker].rank != rank) for maker in makers if maker is not None)
                number = len(cells)
                cells.append(OrderedCell(rank, cell, rows[rank][-1] if rows[rank] else None, needs))
                rows[rank].append(number)
                for action in cell:
                    made.update(dict.fromkeys(made_by(action), number))
                moved = True
    return Order(schedule, tuple(cells), tuple(map(tuple, rows)))


class _Addable(Protocol):
    def __add__(self, other: Any, /) -> Any: ...


Time = TypeVar("Time", bound=_Addable)
"""A number, or an array with one column for each replica."""


def play(
    order: Order,
    durations: Sequence[Time],
    transfers: Sequence[Time],
    *,
    begin: Time,
    later: Callable[[Time, Time], Time],
) -> tuple[list[Time], list[Time]]:
    """Starts and ends of all cells.

    Args:
        order: of the schedule's cells.
        durations: of each cell.
        transfers: from each rank to another.
        begin: when the first cells can start.
        later: the later of two times.
    """
    starts: list[Time] = []
    ends: list[Time] = []
    for cell, duration in zip(order.cells, durations, strict=True):
        start = begin if cell.previous is None else ends[cell.previous]
        for number, is_far in cell.needs:
            at = ends[number]
            start = later(start, at + transfers[order.cells[number].rank] if is_far else at)
        starts.append(start)
        ends.append(start + duration)
    return starts, ends


_ROUNDING = 1e-12


def play_on_shared_cores(
    order: Order, work: Sequence[float], waiting: Sequence[float], *, transfer: float, speed: Callable[[int], float]
) -> tuple[list[float], list[float]]:
    """Starts and ends of all cells where ranks that compute at the same time slow each other down.

    A duration then depends on what the other ranks do meanwhile, so cells are played in the order of time.

    Args:
        order: of the schedule's cells.
        work: of each cell, in seconds at speed 1.
        waiting: seconds that follow the work of each cell and that no other rank shortens.
        transfer: seconds from one rank to another.
        speed: work done per second by each of so many ranks that compute at once.
    """
    starts = [0.0] * len(order.cells)
    ends: dict[int, float] = {}
    position = [0] * len(order.rows)
    running: dict[int, list[float]] = {}  # rank -> [work left, waiting left]
    arrivals: list[float] = []
    now = 0.0
    while True:
        for rank, row in enumerate(order.rows):
            if rank in running or position[rank] == len(row):
                continue
            cell = row[position[rank]]
            needs = order.cells[cell].needs
            if any(need.cell not in ends for need in needs):
                continue
            start = max((ends[need.cell] + (transfer if need.is_far else 0.0) for need in needs), default=0.0)
            if start <= now + _ROUNDING:
                starts[cell], running[rank] = now, [work[cell], waiting[cell]]
            else:
                heapq.heappush(arrivals, start)
        if not running and not arrivals:
            return starts, [ends[number] for number in range(len(order.cells))]
        while arrivals and arrivals[0] <= now + _ROUNDING:
            heapq.heappop(arrivals)
        rate = speed(sum(1 for left, _ in running.values() if left > 0)) if running else 1.0
        nexts = [left / rate if left > 0 else wait for left, wait in running.values()]
        step = min([*nexts, *([arrivals[0] - now] if arrivals else [])], default=0.0)
        now += step
        for rank, state in list(running.items()):
            if state[0] > 0:
                state[0] = max(0.0, state[0] - step * rate)
                state[0] = 0.0 if state[0] < _ROUNDING else state[0]
            else:
                state[1] = max(0.0, state[1] - step)
            if state[0] <= 0 and state[1] <= _ROUNDING:
                ends[order.rows[rank][position[rank]]] = now
                position[rank] += 1
                del running[rank]


Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A schedule in time."""

    spans: tuple[tuple[Span, ...], ...]
    """Start and end of every cell, by rank."""

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


def timeline_of(order: Order, starts: Sequence[float], ends: Sequence[float]) -> Timeline:
    """Played times, rank by rank."""
    return Timeline(spans=tuple(tuple((starts[cell], ends[cell]) for cell in row) for row in order.rows))


def critical_path(
    order: Order, starts: Sequence[float], ends: Sequence[float], transfers: Sequence[float], *, last: int
) -> list[int]:
    """The cells that the end of cell ``last`` goes back to, by their numbers, from the first start on."""
    path = [last]
    while (source := _waited_for(order, path[-1], starts, ends, transfers)) is not None:
        path.append(source)
    return path[::-1]


def _waited_for(
    order: Order, number: int, starts: Sequence[float], ends: Sequence[float], transfers: Sequence[float]
) -> int | None:
    """The cell whose end let another start; None for one that could start at once."""
    cell = order.cells[number]
    if cell.previous is not None and ends[cell.previous] == starts[number]:
        return cell.previous
    for need in cell.needs:
        delay = transfers[order.cells[need.cell].rank] if need.is_far else 0.0
        if ends[need.cell] + delay == starts[number]:
            return need.cell
    return None


def activation_changes(row: Row) -> Iterator[tuple[int, Action, bool]]:
    """Every change of the activations that a rank holds: the cell's index, the action, and whether they come or go.

    Within a cell those of a forward come before those of a backward go: they are held at once.
    """
    for index, cell in enumerate(row):
        for action in cell:
            if action.kind is Kind.FORWARD:
                yield index, action, True
        for action in cell:
            if frees_activations(action):
                yield index, action, False


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Microbatches of one stage that each rank holds at its fullest: from their forward until their weights' gradient."""
    return tuple(_peak(row) for row in schedule.rows)


def peak_activations_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The same of each stage alone, on that of its ranks that holds more. The stages of a rank need not be fullest at once."""
    peaks = [0] * schedule.grid.num_stages
    for rank, row in enumerate(schedule.rows):
        for stage in schedule.grid.stages_of(rank):
            peaks[stage] = max(peaks[stage], _peak(row, stage))
    return tuple(peaks)


def _peak(row: Row, stage: int | None = None) -> int:
    held = peak = 0
    for _, action, comes in activation_changes(row):
        if stage is None or action.stage == stage:
            held += 1 if comes else -1
            peak = max(peak, held)
    return peak
