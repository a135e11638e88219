"""A step played as events: every rank's cells, transfers, sums and gathers, from the very schedule that a run executes.

A step is: weights that ZeRO-3 must have before the first cell, the pipeline, the sum of gradients (part of it under the last
backward passes), the update when all have their sums, the gather of what was updated, and what a step takes in any case.
Replicas that are alike are played once (``conditions.fold``), so ten thousand devices cost what one pipeline costs.
"""

import numpy as np

from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.pipelines import DEFAULT_SCHEDULE, schedule_facts
from shoal.core.plan import Plan
from shoal.planner.pricing.cost import StepParts
from shoal.planner.simulation.cells import CellTimes, StepBytes, play_columns, time_cells
from shoal.planner.simulation.conditions import (
    ASYNCHRONOUS_STEPS,
    Array,
    Conditions,
    Folded,
    check_conditions,
    factors_of,
    fold,
)
from shoal.planner.simulation.result import SimulatedStep, play_step_ends
from shoal.schedules.catalogue import find_schedule, schedule_of_plan
from shoal.schedules.player import Order, order_cells
from shoal.schedules.schedule import Schedule

_BLOCK = 2_000_000
"""Cells times columns that are played at once: 16 MB an array."""


def simulate_step(
    parts: StepParts,
    schedule: Schedule | None = None,
    *,
    plan: Plan,
    conditions: Conditions | None = None,
    step: int = 0,
    needed: StepBytes | None = None,
    every_replica: bool = False,
) -> SimulatedStep:
    """Play one step.

    Args:
        parts: what it is made of.
        schedule: of the pipeline; the plan's own when left out.
        plan: how ranks are laid out.
        conditions: what makes ranks unlike.
        step: whose draws are played, where steps differ.
        needed: bytes, for the memory of every rank.
        every_replica: play every replica by itself, also where they are alike.

    Raises:
        RequestError: the parts are not those of the plan, or the conditions name ranks that are not there.
    """
    conditions = conditions or Conditions()
    check_conditions(conditions, plan)
    schedule = schedule or schedule_for(plan, parts.microbatches)
    _check_parts(parts, schedule, plan)
    order = order_cells(schedule)
    prices = time_cells(order, parts)
    factors = factors_of(plan, conditions, step)
    folded = fold(factors, every=every_replica)
    if schedule.updates.are_asynchronous:
        folded = _in_lockstep(folded)
    last = _last_ends(order, prices, parts, folded)
    return SimulatedStep(
        plan=plan,
        parts=parts,
        order=order,
        prices=prices,
        folded=folded,
        last=last,
        ends=play_step_ends(parts, plan, schedule, last, folded.compute, folded.links),
        needed=needed,
        window=_window(order, prices, parts, folded),
    )


def step_times(
    parts: StepParts, schedule: Schedule | None = None, *, plan: Plan, conditions: Conditions, num_steps: int
) -> Array:
    """Seconds of each of many steps, every one with its own draws."""
    schedule = schedule or schedule_for(plan, parts.microbatches)
    if not conditions.varies or schedule.updates.are_asynchronous:
        drawn = num_steps if conditions.varies else 1
        seconds = [
            simulate_step(parts, schedule, plan=plan, conditions=conditions, step=step).step_seconds
            for step in range(drawn)
        ]
        return np.array(seconds if conditions.varies else seconds * num_steps)
    check_conditions(conditions, plan)
    _check_parts(parts, schedule, plan)
    order = order_cells(schedule)
    prices = time_cells(order, parts)
    replicas = plan.degree(Axis.DATA)
    at_once = max(1, _BLOCK // (replicas * len(order.cells)))
    found: list[float] = []
    for first in range(0, num_steps, at_once):
        drawn_steps = [factors_of(plan, conditions, step) for step in range(first, min(num_steps, first + at_once))]
        compute = np.concatenate([factors.compute for factors in drawn_steps], axis=1)
        links = np.concatenate([factors.links for factors in drawn_steps], axis=1)
        last = _last_ends(order, prices, parts, Folded(compute, links, ()))
        for index in range(len(drawn_steps)):
            own = slice(index * replicas, (index + 1) * replicas)
            found.append(play_step_ends(parts, plan, schedule, last[:, own], compute[:, own], links[:, own]).end)
    return np.array(found)


def schedule_for(plan: Plan, microbatches: int) -> Schedule:
    """The schedule that a plan names, over several steps where it flows; without a pipeline, microbatch after microbatch.

    Raises:
        RequestError: it cannot be had in this size.
    """
    if plan.pp == 1:
        return find_schedule(DEFAULT_SCHEDULE, ranks=1, microbatches=microbatches)
    steps = ASYNCHRONOUS_STEPS if schedule_facts(plan.schedule).is_asynchronous else 1
    return schedule_of_plan(plan, microbatches=microbatches, steps=steps)


def _check_parts(parts: StepParts, schedule: Schedule, plan: Plan) -> None:
    grid = schedule.grid
    played = ASYNCHRONOUS_STEPS if schedule.updates.are_asynchronous else 1
    facts = (
        ("stages", len(parts.stages), grid.num_stages),
        ("microbatches", parts.microbatches * played, grid.num_microbatches),
        ("pipeline ranks", plan.pp, grid.num_ranks),
    )
    for what, given, wanted in facts:
        if given != wanted:
            raise RequestError(
                f"the step has {given} {what}, and schedule {schedule.name} is for {wanted}; price the step for this schedule"
            )
    if plan.ps:
        raise RequestError(
            f"plan {str(plan)!r}: parameter servers (ps={plan.ps}) are not simulated; give a plan with dp in their place"
        )


def _in_lockstep(folded: Folded) -> Folded:
    """Replicas that meet at every update of an asynchronous pipeline: each goes at the pace of the slowest."""
    everyone = tuple(sorted(replica for group in folded.groups for replica in group))
    return Folded(folded.compute.max(axis=1, keepdims=True), folded.links.max(axis=1, keepdims=True), (everyone,))


def _last_ends(order: Order, prices: CellTimes, parts: StepParts, folded: Folded) -> Array:
    """When each rank's last cell ends, by (place, column); in blocks, because all cells of all columns would not fit."""
    last_cells = [row[-1] for row in order.rows]
    width = max(1, _BLOCK // len(order.cells))
    blocks = []
    for first in range(0, folded.compute.shape[1], width):
        columns = slice(first, first + width)
        links = folded.links[:, columns]
        _, ends = play_columns(order, prices.durations(folded.compute[:, columns], links), parts.delay * links)
        blocks.append(ends[last_cells])
    return np.concatenate(blocks, axis=1)


def _window(order: Order, prices: CellTimes, parts: StepParts, folded: Folded) -> tuple[float, float]:
    """What one step adds to steps without a flush: from the end of the second to the end of the third."""
    if not order.schedule.updates.are_asynchronous:
        return 0.0, 0.0
    _, ends = play_columns(order, prices.durations(folded.compute, folded.links), parts.delay * folded.links)
    until = [0.0] * ASYNCHRONOUS_STEPS
    for number, each in enumerate(order.cells):
        for action in each.cell:
            index = action.microbatch // parts.microbatches
            until[index] = max(until[index], float(ends[number, 0]))
    return until[1], until[2]
