"""Whether a schedule is legal: what the runtime may rely on, proved before anything runs.

complete    every stage does every microbatch's forward and backward once, on the rank where that stage lies
acyclic     with receives that block and sends that do not, every rank comes to its end
in order    what one rank sends another, activations and gradients apart, is wanted in the order in which it is sent
bounded     no rank holds more activations or versions than the family promises
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from shoal.core.errors import RequestError
from shoal.schedules.draw import draw_order
from shoal.schedules.player import activation_changes, find_stuck, peak_activations
from shoal.schedules.schedule import Action, Point, Result, Schedule, made_by, needs_of, receiver_of, write_cell
from shoal.schedules.versions import held_versions, peak_versions


class IllegalSchedule(RequestError):
    """A schedule that would compute something else, or never end."""


def check(schedule: Schedule) -> None:
    """Refuse an illegal schedule.

    Raises:
        IllegalSchedule: what is wrong and at which cell, with the grid and an arrow.
    """
    problem = next(_problems(schedule), None)
    if problem is not None:
        rank, index, text = problem
        raise IllegalSchedule(f"schedule {schedule.name}: {text}\n{draw_order(schedule, arrow=(rank, index))}")


Problem = tuple[int, int, str]
"""A rank, the index of its cell, and what is wrong there."""


def _problems(schedule: Schedule) -> Iterator[Problem]:
    """In the order of the rules; each relies on those before it."""
    if len(schedule.rows) != schedule.grid.num_ranks:
        yield 0, 0, f"it has {len(schedule.rows)} rows for {schedule.grid.num_ranks} ranks; write a row per rank"
        return
    for rule in (_misplaced, _incomplete, _stuck, _out_of_order, _above_bounds):
        yield from rule(schedule)


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(schedule.rows):
        for index, cell in enumerate(row):
            for action in cell:
                yield rank, index, action


def _misplaced(schedule: Schedule) -> Iterator[Problem]:
    grid = schedule.grid
    for rank, index, action in _cells(schedule):
        if action.stage >= grid.num_stages:
            yield rank, index, f"{action} is of stage {action.stage}, and the stages are 0 to {grid.num_stages - 1}"
        elif action.microbatch >= grid.num_microbatches:
            last = grid.num_microbatches - 1
            yield rank, index, f"{action} is of microbatch {action.microbatch}, and the microbatches are 0 to {last}"
        elif grid.rank_of(action.stage, action.microbatch) != rank:
            right = grid.rank_of(action.stage, action.microbatch)
            where = f"in this {grid.fold} its stage lies on" if not grid.replicas else "it is the turn of"
            yield (
                rank,
                index,
                f"{action} is in the row of rank {rank}, and {where} rank {right}; move it there",
            )


def _incomplete(schedule: Schedule) -> Iterator[Problem]:
    grid = schedule.grid
    made: Counter[Result] = Counter()
    for rank, index, action in _cells(schedule):
        made.update(made_by(action))
        twice = [result for result in made_by(action) if made[result] > 1]
        if twice:
            yield rank, index, f"{action} does again what was done before; remove one of the two"
    words = {Point.OUTPUT: "F", Point.GRADIENT: "B (or I)", Point.WEIGHTS: "W after its I"}
    for microbatch in range(grid.num_microbatches):
        for stage in range(grid.num_stages):
            rank = grid.rank_of(stage, microbatch)
            for point, word in words.items():
                if not made[point, stage, microbatch]:
                    index = len(schedule.rows[rank])
                    yield (
                        rank,
                        index,
                        f"stage {stage} has no {word} of microbatch {microbatch}; add it to the row of rank {rank}",
                    )


def _stuck(schedule: Schedule) -> Iterator[Problem]:
    waiting = find_stuck(schedule)
    if not waiting:
        return
    done = {
        result
        for rank, row in enumerate(schedule.rows)
        for cell in row[: waiting.get(rank, len(row))]
        for action in cell
        for result in made_by(action)
    }
    makers = {result: (rank, action) for rank, _, action in _cells(schedule) for result in made_by(action)}
    rank = min(waiting)
    chain: list[str] = []
    seen: set[int] = set()
    # Each rank waits for one that waits: following them comes round.
    while rank not in seen:
        seen.add(rank)
        cell = schedule.rows[rank][waiting[rank]]
        missing = [need for action in cell for need in needs_of(action, schedule.grid.num_stages) if need not in done]
        maker_rank, maker = makers[missing[0]]
        chain.append(f"rank {rank} waits at {write_cell(cell)} for {maker} of rank {maker_rank}")
        rank = maker_rank
    text = f"it never ends: {', '.join(chain)}; move one of these cells earlier or later"
    yield rank, waiting[rank], text


def _out_of_order(schedule: Schedule) -> Iterator[Problem]:
    """Messages between two ranks are first in, first out: a receiver that wants the second first would wait for ever."""
    grid = schedule.grid
    sent: dict[tuple[int, int, Point], list[Result]] = defaultdict(list)
    wanted: dict[tuple[int, int, Point], list[tuple[Result, int]]] = defaultdict(list)
    for rank, index, action in _cells(schedule):
        for result in made_by(action):
            target = receiver_of(result, grid)
            if target is not None:
                sent[rank, target, result[0]].append(result)
        for result in needs_of(action, grid.num_stages):
            source = grid.rank_of(result[1], result[2])
            if source != rank:
                wanted[source, rank, result[0]].append((result, index))
    for (source, target, point), results in wanted.items():
        for place, (result, index) in enumerate(results):
            first = sent[source, target, point][place]
            if first != result:
                yield (
                    target,
                    index,
                    f"rank {target} wants the {point} of stage {result[1]}, microbatch {result[2]} from rank {source}, which "
                    f"sends that of stage {first[1]}, microbatch {first[2]} before it; give both ranks one order",
                )


def _above_bounds(schedule: Schedule) -> Iterator[Problem]:
    for what, bounds, peaks in (
        ("activations", schedule.activation_bound, peak_activations(schedule)),
        ("versions of its weights", schedule.version_bound, peak_versions(schedule)),
    ):
        for rank, (bound, peak) in enumerate(zip(bounds or peaks, peaks, strict=True)):
            if peak > bound:
                find = _first_above if what == "activations" else _first_above_versions
                index = find(schedule, rank, bound)
                yield rank, index, f"rank {rank} holds {peak} {what}, and the bound of {schedule.name} is {bound}"


def _first_above(schedule: Schedule, rank: int, bound: int) -> int:
    held = 0
    for index, _, comes in activation_changes(schedule.rows[rank]):
        held += 1 if comes else -1
        if held > bound:
            return index
    return 0


def _first_above_versions(schedule: Schedule, rank: int, bound: int) -> int:
    cell_of = [index for index, cell in enumerate(schedule.rows[rank]) for _ in cell]
    moments = enumerate(held_versions(schedule, rank))
    return next(cell_of[place] for place, moment in moments if len(moment.alive) > bound)
