"""``shoal tune``: the best predicted plans, tried for a few real steps each; the fastest is kept. No torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.trainer.config import Recipe
from shoal.tuning.plan_choice import AUTO, Log, open_pool, search
from shoal.tuning.successive_halving import Entry, halve_plans

_LEAST_STEPS, _MOST_TURNS = 2, 4
"""Of a turn, and turns of a plan: short ones, so that a machine that drifts slows all plans alike."""


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
    log: Log = lambda line: None,
) -> Tuned:
    """Try the best plans.

    Args:
        recipe: what is to be trained.
        num_processes: of every plan; as many as there are cores when left out.
        top: how many plans.
        steps: real steps of each, in several turns.
        machine: the machine file; the user's own when left out.
        log: given lines for people.

    Raises:
        RequestError: no plan fits.
        RunError: none of the plans could be tried.
    """
    if left_out := _left_out(recipe):
        log(left_out)
    with open_pool(recipe, num_processes, machine=machine, log=log) as (pool, found, origin):
        log(
            f"looking for the best {top} plans for {pool.num_processes} processes, for at most "
            f"{recipe.planner.auto.search_seconds:g} s (planner.auto.search_seconds)"
        )
        choice = search(pool, found, origin)
        chosen = {str(page["plan"]): page for page in choice.ranked[:top]}
        turns = min(_MOST_TURNS, max(1, steps // _LEAST_STEPS))
        halving = halve_plans(
            list(chosen),
            lambda plan, steps: pool.play(plan, steps=steps),
            steps=math.ceil(steps / turns),
            budget_seconds=math.inf,
            halves=False,
            most_rounds=turns,
            log=log,
        )
    fastest = halving.entries[0]
    if fastest.problem:
        raise RunError(f"none of the {len(chosen)} plans could be tried; the first failed with: {fastest.problem}")
    plans = [_tuned(chosen[entry.plan], entry, fastest.seconds) for entry in halving.entries]
    first = next(entry for entry in halving.entries if entry.plan == choice.plan)
    return Tuned(
        plan=fastest.plan,
        plans=tuple(plans),
        num_legal=choice.num_legal,
        machine=choice.machine,
        regret=float("nan") if first.problem else first.ratio - 1,
    )


def _left_out(recipe: Recipe) -> str:
    """Why the recipe's own plan is not among those that are tried; empty where it may be."""
    if recipe.plan.strip() == AUTO:
        return ""
    plan = Plan.parse(recipe.plan)
    if plan.ps:
        what = "parameter servers change"
    elif plan.sync != "allreduce":
        what = f"sync={plan.sync} changes"
    elif plan.compress is not None:
        what = f"compress={plan.compress} changes"
    elif plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        what = f"schedule={plan.schedule} changes"
    else:
        return ""
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
