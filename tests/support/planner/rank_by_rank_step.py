"""A step with every rank written out, one number at a time: what folded and vectorised simulation must agree with.

Shares no code with ``shoal.planner``'s playing: ranks are separate, lockstep along ``tp`` and ``cp`` is a wait in every cell.
"""

import itertools

from shoal.core.plan import Plan
from shoal.planner.pricing.cost import StepParts
from shoal.schedules.schedule import Schedule, made_by, needs_of


def play_every_rank(parts: StepParts, schedule: Schedule, plan: Plan, factors: dict[int, float]) -> float:
    """Seconds of a step in which rank r takes ``factors[r]`` times as long to compute."""
    replicas, inner = plan.dp or 1, plan.tp * plan.cp
    head = max(0.0, parts.gather - parts.gather_hidden) if plan.zero == 3 else 0.0
    after = 0.0 if plan.zero == 3 else max(0.0, parts.gather - parts.gather_hidden)
    assert all(factor >= 1 for factor in factors.values())

    def rank_of(place: int, replica: int, own: int) -> int:
        return (place * replicas + replica) * inner + own

    free = dict.fromkeys(range(plan.pp * replicas * inner), head)
    for replica in range(replicas):
        _work_off(
            parts, schedule, [[rank_of(p, replica, i) for i in range(inner)] for p in range(plan.pp)], factors, free
        )
    summed = 0.0
    for place in range(plan.pp):
        members = [rank_of(place, replica, own) for replica, own in itertools.product(range(replicas), range(inner))]
        summed = max(summed, max(free[rank] for rank in members) + max(0.0, parts.reduce - parts.reduce_hidden))
    end = 0.0
    for place in range(plan.pp):
        members = [rank_of(place, replica, own) for replica, own in itertools.product(range(replicas), range(inner))]
        end = max(end, max(summed + parts.update * factors.get(rank, 1.0) for rank in members) + after)
    return end + parts.fixed


def _work_off(
    parts: StepParts, schedule: Schedule, ranks: list[list[int]], factors: dict[int, float], free: dict[int, float]
) -> None:
    grid, ready, at = schedule.grid, {}, [0] * len(ranks)
    while any(at[place] < len(row) for place, row in enumerate(schedule.rows)):
        for place, row in enumerate(schedule.rows):
            if at[place] == len(row):
                continue
            cell = row[at[place]]
            wanted = [result for action in cell for result in needs_of(action, grid.num_stages)]
            if any(result not in ready for result in wanted):
                continue
            start = max(free[rank] for rank in ranks[place])
            for result in wanted:
                made, source = ready[result]
                start = max(start, made + (parts.transfer if source != place and parts.overlaps_transfer else 0.0))
            passes = sum(action.kind != "W" for action in cell)
            moved = 0.0 if parts.overlaps_transfer else passes * parts.transfer
            ends = []
            for rank in ranks[place]:
                end = start + moved
                for action in cell:
                    stage = parts.stages[action.stage]
                    whole = {"F": stage.forward, "I": stage.input, "W": stage.weight, "B": stage.backward}[action.kind]
                    talk = sum(stage.exposed.values()) * whole / (stage.forward + stage.backward)
                    end += (whole - talk) * factors.get(rank, 1.0) + talk
                ends.append(end)
            for rank in ranks[place]:
                free[rank] = max(ends)
            ready.update({result: (max(ends), place) for action in cell for result in made_by(action)})
            at[place] += 1
