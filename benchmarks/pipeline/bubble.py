"""The idle time of a step that was taken, beside what its schedule prices at the times of that same step.

measured    1 - busy / (ranks * makespan): busy is the time in actions without what they waited for other ranks
predicted   the schedule, priced at the median of each rank's F, B, I and W of each stage in this step, and the median transfer
jitter      how much more the schedule prices when each action has its own time in place of the median
rest        measured less predicted less jitter: what is between the actions
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass

from workload import Taken

from shoal.schedules.pricing import Costs, price
from shoal.schedules.schedule import Action, Schedule, made_by, needs_of, parse_action

Rows = list[list[Taken]]
"""What each rank's observer was told in one step."""


@dataclass(frozen=True)
class Span:
    """An action of one rank, without what it waited."""

    asked: float
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Of computing."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """Of one step."""

    measured: float
    predicted: float
    jitter: float
    by_rank: list[float]
    """Measured less predicted."""
    predicted_by_rank: list[float]
    makespan: float
    priced: float
    transfer: float

    @property
    def rest(self) -> float:
        """Neither predicted nor jitter."""
        return self.measured - self.predicted - self.jitter


def spans_of(rows: Rows) -> dict[Action, Span]:
    """All ranks' actions."""
    return {parse_action(name): Span(begin, begin + waited, end) for row in rows for name, begin, waited, end in row}


def transfer_of(schedule: Schedule, spans: dict[Action, Span]) -> float:
    """From the end of an action on one rank to the beginning of one on another that was waiting for it."""
    grid = schedule.grid
    maker = {result: action for action in spans for result in made_by(action)}
    found = []
    for action, span in spans.items():
        for result in needs_of(action, grid.num_stages):
            source = maker[result]
            is_far = grid.rank_of(source.stage, source.microbatch) != grid.rank_of(action.stage, action.microbatch)
            if is_far and span.asked < spans[source].end:
                found.append(max(0.0, span.begin - spans[source].end))
    return statistics.median(found) if found else 0.0


Key = tuple[int, int, str]
"""Rank, stage and kind. Two ranks that have a stage, as those of chimera, need not be equally fast."""


def key_of(schedule: Schedule, action: Action) -> Key:
    """What an action's time is a sample of."""
    return schedule.grid.rank_of(action.stage, action.microbatch), action.stage, str(action.kind)


def medians_of(schedule: Schedule, spans: dict[Action, Span]) -> dict[Key, float]:
    """By rank, stage and kind."""
    seconds = defaultdict(list)
    for action, span in spans.items():
        seconds[key_of(schedule, action)].append(span.seconds)
    return {key: statistics.median(values) for key, values in seconds.items()}


def at_medians(schedule: Schedule, medians: dict[Key, float], transfer: float) -> Costs:
    """What each action of a schedule takes, by its rank, stage and kind."""
    every = [action for rank in range(len(schedule.rows)) for action in schedule.actions(rank)]
    return Costs(measured={action: medians[key_of(schedule, action)] for action in every}, transfer=transfer)


def bubble_of(schedule: Schedule, rows: Rows) -> Bubble:
    """Measured and predicted, of the same step."""
    spans = spans_of(rows)
    makespan = max(span.end for span in spans.values()) - min(span.begin for span in spans.values())
    busy = [sum(end - begin - waited for _, begin, waited, end in row) for row in rows]
    transfer = transfer_of(schedule, spans)
    timeline = price(schedule, at_medians(schedule, medians_of(schedule, spans), transfer))
    own = Costs(measured={action: span.seconds for action, span in spans.items()}, transfer=transfer)
    expected = [1 - timeline.busy(rank) / timeline.makespan for rank in range(len(rows))]
    return Bubble(
        measured=1 - sum(busy) / (len(rows) * makespan),
        predicted=timeline.bubble,
        jitter=price(schedule, own).bubble - timeline.bubble,
        by_rank=[1 - busy[rank] / makespan - expected[rank] for rank in range(len(rows))],
        predicted_by_rank=expected,
        makespan=makespan,
        priced=timeline.makespan,
        transfer=transfer,
    )
