"""``shoal tune``: the best predicted plans, tried for a few real steps each; the fastest is kept. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError
from shoal.planner.machine import num_cores
from shoal.trainer.config import Recipe
from shoal.trainer.forecasts.deciding import Decision, decide
from shoal.trainer.forecasts.trial import Trial

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TunedPlan:
    """One plan, predicted and tried."""

    plan: str
    predicted_seconds: float
    measured_seconds: float | None
    """Median of the steps; None where it could not be tried."""
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
    decision: Decision | None = None,
) -> Tuned:
    """Try the best plans.

    Args:
        recipe: what is to be trained.
        num_processes: of every plan; as many as there are cores when left out.
        top: how many plans.
        steps: real steps of each, in two turns.
        machine: the machine file; the user's own when left out.
        tell: told what is being done.
        decision: what was predicted; worked out when left out.

    Raises:
        RequestError: no plan fits.
        RunError: none of the plans could be tried.
    """
    count = num_processes or num_cores()
    decision = decision or decide(recipe, count, machine=machine)
    chosen = decision.ranked[:top]
    with Trial(recipe, count) as trial:
        tried = trial.run([str(page["plan"]) for page in chosen], steps=steps, tell=tell)
    plans = [_tuned(page, one.median, one.problem) for page, one in zip(chosen, tried, strict=True)]
    plans.sort(key=lambda plan: float("inf") if plan.measured_seconds is None else plan.measured_seconds)
    fastest = plans[0].measured_seconds
    if fastest is None:
        raise RunError(f"none of the {len(plans)} plans could be tried; the first failed with: {plans[0].problem}")
    first = next(plan for plan in plans if plan.plan == chosen[0]["plan"]).measured_seconds
    return Tuned(
        plan=plans[0].plan,
        plans=tuple(plans),
        num_legal=decision.num_legal,
        machine=decision.machine,
        regret=float("nan") if first is None else first / fastest - 1,
    )


def _tuned(page: dict[str, Any], median: float, problem: str) -> TunedPlan:
    predicted = float(page["seconds"])
    return TunedPlan(
        plan=str(page["plan"]),
        predicted_seconds=predicted,
        measured_seconds=None if problem else median,
        error=None if problem else predicted / median - 1,
        problem=problem,
    )
