"""``shoal tune``: the best predicted plans, tried for a few real steps each; the fastest is kept. No torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.engine.resolve import check_processes
from shoal.planner.hardware.machine import num_cores
from shoal.trainer.config import Recipe
from shoal.tuning.calibration import find_machine
from shoal.tuning.plan_choice import AUTO, require_plans, search
from shoal.tuning.rehearsal_pool import RehearsalPool
from shoal.tuning.successive_halving import Entry, halve_plans

_LEAST_STEPS, _MOST_TURNS = 2, 4
"""Of a turn, and turns of a plan: short ones, so that a machine that drifts slows all plans alike."""

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TunedPlan:
    """One plan, predicted and tried."""

    plan: str
    predicted_seconds: float
    measured_seconds: float | None
    """The median step of the fastest, times the ratio of both in the same rounds; None where it could not be tried."""
    error: float | None
    """Predicted over measured, less one."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a tuning found."""

    plan: str
    """The fastest measured."""
    plans: tuple[TunedPlan, ...]
    """By measured time, those that failed last."""
    num_legal: int
    machine: str
    regret: float
    """How much slower the best predicted plan was than the fastest, measured."""


def tune(
    recipe: Recipe,
    *,
    num_processes: int | None,
    top: int,
    steps: int,
    machine: Path | None = None,
    tell: Tell | None = None,
) -> Tuned:
    """Try the best plans.

    Args:
        recipe: what is to be trained.
        num_processes: of every plan; as many as there are cores when left out.
        top: how many plans.
        steps: real steps of each, in several turns.
        machine: the machine file; the user's own when left out.
        tell: told what is being done.

    Raises:
        RequestError: no plan fits.
        RunError: none of the plans could be tried.
    """
    count = num_processes or num_cores()
    check_processes(count)
    tell = tell or (lambda line: None)
    if left_out := _left_out(recipe):
        tell(left_out)
    before = partial(require_plans, recipe, count)
    found, origin = find_machine(machine, num_processes=count, tell=tell, before=before)
    tell(
        f"looking for the best {top} plans for {count} processes, for at most {recipe.planner.auto.search_seconds:g} s "
        f"(planner.auto.search_seconds)"
    )
    with RehearsalPool(recipe, count) as pool:
        decision = search(pool, found, origin)
        chosen = {str(page["plan"]): page for page in decision.ranked[:top]}
        turns = min(_MOST_TURNS, max(1, steps // _LEAST_STEPS))
        halving = halve_plans(
            list(chosen),
            lambda plan, steps: pool.play(plan, steps=steps).seconds,
            steps=math.ceil(steps / turns),
            budget_seconds=math.inf,
            halves=False,
            most_rounds=turns,
            tell=tell,
        )
    fastest = halving.entries[0]
    if fastest.problem:
        raise RunError(f"none of the {len(chosen)} plans could be tried; the first failed with: {fastest.problem}")
    plans = [_tuned(chosen[entry.plan], entry, fastest.seconds) for entry in halving.entries]
    first = next(entry for entry in halving.entries if entry.plan == decision.plan)
    return Tuned(
        plan=fastest.plan,
        plans=tuple(plans),
        num_legal=decision.num_legal,
        machine=decision.machine,
        regret=float("nan") if first.problem else first.ratio - 1,
    )


def _left_out(recipe: Recipe) -> str:
    """Why the recipe's own plan is not among those that are tried; empty where it may be."""
    if recipe.plan.strip() == AUTO:
        return ""
    plan = Plan.parse(recipe.plan)
    if not plan.ps and not (plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous):
        return ""
    what = "parameter servers change" if plan.ps else f"schedule={plan.schedule} changes"
    return f"the recipe's own plan, {plan}, is left out: {what} what is computed, and only plans that do not are tried"


def _tuned(page: dict[str, Any], entry: Entry, fastest: float) -> TunedPlan:
    predicted = float(page["seconds"])
    measured = None if entry.problem else fastest * entry.ratio
    return TunedPlan(
        plan=entry.plan,
        predicted_seconds=predicted,
        measured_seconds=measured,
        error=None if measured is None else predicted / measured - 1,
        problem=entry.problem,
    )
