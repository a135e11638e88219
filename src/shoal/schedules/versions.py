"""Which version of its weights a stage uses for a microbatch, and how many a rank holds, read from a schedule.

A version is the number of updates that made it. Synchronous schedules have one; the papers' rules for the others are

    stashed     forward: the newest on this stage; backward: that of the forward      PipeDream, SOSP 2019, section 3.3
    vertical    on every stage the version that was the newest on the first stage     the same, "vertical sync"
    buffered    the version before the newest, of updates ``accumulate`` apart        2BW, ICML 2021, section 3.1
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.schedules.schedule import Action, Kind, Schedule, Updates, frees_activations

Used = Mapping[tuple[int, int], int]


def versions_used(schedule: Schedule) -> Used:
    """The version that each (stage, microbatch) computes with, forward and backward."""
    grid = schedule.grid
    every = [(stage, microbatch) for stage in range(grid.num_stages) for microbatch in range(grid.num_microbatches)]
    if schedule.updates is Updates.FLUSH:
        return dict.fromkeys(every, 0)
    if schedule.updates is Updates.BUFFERED:
        return {(stage, microbatch): max(0, microbatch // schedule.accumulate - 1) for stage, microbatch in every}
    newest = {key: version for rank in range(grid.num_ranks) for key, version in _newest(schedule, rank).items()}
    if schedule.updates is Updates.VERTICAL:
        return {(stage, microbatch): newest[0, microbatch] for stage, microbatch in every}
    return newest


@dataclass(frozen=True)
class Moment:
    """After one action of a rank: the versions that it must still hold."""

    action: Action
    alive: frozenset[int]


def held_versions(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """What a rank holds after each of its actions: the newest, and each that a microbatch will still use there.

    The runtime frees what is not in this set. Only for one stage per rank, which is what asynchronous families have.
    """
    return _held(schedule, rank, versions_used(schedule))


def _held(schedule: Schedule, rank: int, used: Used) -> tuple[Moment, ...]:
    actions = list(schedule.actions(rank))
    last_use = {used[action.stage, action.microbatch]: index for index, action in enumerate(actions)}
    moments, newest, done = [], 0, 0
    alive = {newest}
    for index, action in enumerate(actions):
        if schedule.updates is not Updates.FLUSH and frees_activations(action):
            done += 1
            newest = done // schedule.accumulate
        # Only from what was alive: to look through all versions each time is too slow for long streams.
        alive = {version for version in (*alive, newest) if version == newest or last_use.get(version, -1) > index}
        moments.append(Moment(action, frozenset(alive)))
    return tuple(moments)


def peak_versions(schedule: Schedule) -> tuple[int, ...]:
    """Versions that each rank holds at its fullest."""
    if schedule.updates is Updates.FLUSH:
        return (1,) * schedule.grid.num_ranks
    used = versions_used(schedule)
    moments = (_held(schedule, rank, used) for rank in range(schedule.grid.num_ranks))
    return tuple(max((len(moment.alive) for moment in row), default=1) for row in moments)


def _newest(schedule: Schedule, rank: int) -> dict[tuple[int, int], int]:
    found, done = {}, 0
    for action in schedule.actions(rank):
        if action.kind is Kind.FORWARD:
            found[action.stage, action.microbatch] = done // schedule.accumulate
        elif frees_activations(action):
            done += 1
    return found
