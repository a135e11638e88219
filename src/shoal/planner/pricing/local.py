"""The time of a step on this machine, from what a rank's own passes took and what collectives were measured to take. No torch.

    no pipeline    compute + sum over collectives + fixed
    pipeline       the schedule played with as many cores as there are, + the update and what is summed after the last cell

What a rank computes was timed while all others computed too. A pipeline's ranks wait for each other, and while one waits the
others are faster: so a schedule is played as an event simulation in which every rank that computes goes at the speed of so many
at once (``Machine.slow_down``, scaled to what this plan's own cells were slowed down by).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.plan import Plan
from shoal.planner.hardware.machine import Machine
from shoal.schedules.player import order_cells, play_on_shared_cores, timeline_of
from shoal.schedules.schedule import Action, Schedule

TrafficCounts = Mapping[tuple[str, str], tuple[int, int]]
"""Calls and bytes by axis and operation."""
IN_CELLS = ("tp", "cp")
"""Axes whose collectives are part of forward and backward passes."""


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """One pipeline place: what a rank of it computes while all others do, and what it asks of channels."""

    seconds: float
    """A whole step."""
    cells: Mapping[Action, float]
    """With a pipeline: what each action takes; empty without."""
    traffic: TrafficCounts
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class LocalTime:
    """A predicted step."""

    seconds: float
    compute: float
    """Of the rank that computes longest, with what sharing of cores adds."""
    communication: Mapping[str, float]
    """By axis, of the first rank."""
    bubble: float | None
    """Share of the pipeline's time in which its ranks wait; None without a pipeline."""
    fixed: float


def predict_step(
    plan: Plan,
    schedule: Schedule | None,
    ranks: Sequence[RankWork],
    machine: Machine,
    *,
    slow_down: float | None = None,
) -> LocalTime:
    """The time of one step.

    Args:
        plan: derived.
        schedule: of its pipeline; None without.
        ranks: one for each pipeline place.
        machine: its constants.
        slow_down: of a pipeline's cells when all ranks compute, against one alone; the machine's when left out.
    """
    fit = machine.fit
    if schedule is None:
        (work,) = ranks
        moved = communication(work.traffic, plan, machine)
        total = work.seconds * fit.compute + sum(moved.values()) + fit.fixed_seconds
        return LocalTime(
            seconds=total,
            compute=work.seconds * fit.compute,
            communication=moved,
            bubble=None,
            fixed=fit.fixed_seconds,
        )
    moved = communication(ranks[0].traffic, plan, machine)
    makespan, busy = _pipeline(plan, schedule, ranks, machine, slow_down)
    tails = [max(0.0, work.seconds - sum(work.cells.values())) * fit.compute for work in ranks]
    after = max(
        tail + sum(_after_cells(work.traffic, plan, machine).values()) for tail, work in zip(tails, ranks, strict=True)
    )
    return LocalTime(
        seconds=makespan + after + fit.fixed_seconds,
        compute=max(busy) + max(tails),
        communication=moved,
        bubble=1.0 - sum(busy) / (makespan * len(busy)) if makespan else 0.0,
        fixed=fit.fixed_seconds,
    )


def communication(traffic: TrafficCounts, plan: Plan, machine: Machine) -> dict[str, float]:
    """Seconds of all collectives of one rank in one step, by axis."""
    found: dict[str, float] = {}
    for (axis, operation), (calls, num_bytes) in traffic.items():
        # A share of a weight that several stages hold is a message as any other, at the end of the pipeline.
        name, ranks = ("send", 2) if operation == "share" else (operation, axis_size(axis, plan))
        one = machine.collective_seconds(name, num_bytes / max(1, calls), ranks=ranks, processes=plan.world_size)
        found[axis] = found.get(axis, 0.0) + calls * one * machine.fit.communication
    return found


def axis_size(axis: str, plan: Plan) -> int:
    """Ranks of a channel by its name."""
    if axis == "everyone":
        return plan.world_size
    if axis == "replicas":
        return (plan.dp or 1) * plan.cp
    return {"dp": plan.dp or 1, "tp": plan.tp, "cp": plan.cp, "pp": plan.pp}[axis]


def _after_cells(traffic: TrafficCounts, plan: Plan, machine: Machine) -> dict[str, float]:
    after = {key: moved for key, moved in traffic.items() if key[0] not in IN_CELLS and key[1] != "send"}
    return communication(after, plan, machine)


def _pipeline(
    plan: Plan, schedule: Schedule, ranks: Sequence[RankWork], machine: Machine, slow_down: float | None
) -> tuple[float, list[float]]:
    """Length of the pipeline's part of a step, and the time in which each rank computes in it."""
    inside: dict[int, float] = {}
    transfer = 0.0
    for place, work in enumerate(ranks):
        cells = {key: moved for key, moved in work.traffic.items() if key[0] in IN_CELLS}
        inside[place] = sum(communication(cells, plan, machine).values()) / max(1, len(work.cells))
        calls, num_bytes = work.traffic.get(("pp", "send"), (0, 0))
        if calls:
            one = machine.collective_seconds("send", num_bytes / calls, ranks=2, processes=plan.world_size)
            transfer = max(transfer, one * machine.fit.communication)
    # Every replica and every rank that shares a stage does the same at the same time.
    beside, threads = plan.world_size // plan.pp, ranks[0].threads
    by_all = machine.slow_down(plan.world_size, threads)
    scale = max(0.0, slow_down - 1.0) / (by_all - 1.0) if slow_down is not None and by_all > 1.0 else 1.0

    def slowed(processes: int) -> float:
        # Fewer are never slower than all, whatever a noisy machine file says.
        return 1.0 + (min(machine.slow_down(processes, threads), by_all) - 1.0) * scale

    def speed(active: int) -> float:
        return slowed(plan.world_size) / slowed(active * beside) / machine.fit.compute

    order = order_cells(schedule)
    seconds = [sum(ranks[each.rank].cells[action] for action in each.cell) for each in order.cells]
    waiting = [inside[each.rank] for each in order.cells]
    times = play_on_shared_cores(order, seconds, waiting, transfer=transfer, speed=speed)
    timeline = timeline_of(order, *times)
    return timeline.makespan, [timeline.busy(rank) for rank in range(len(ranks))]
