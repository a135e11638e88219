"""What ``shoal train --find-rate`` asks for and prints. No torch: the launcher does both."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.plan import Plan

FIND_RATE = "--find-rate"
"""The argument of a rank that searches."""
_ROWS = 20
"""Of the table; the JSON has all."""


def refuse_search(plan: Plan) -> None:
    """Refuse a plan that a search says nothing about.

    Raises:
        RequestError: says why, and which plan can.
    """
    if plan.ps or plan.islands > 1 or plan.sync != "allreduce":
        raise RequestError(
            f"plan {str(plan)!r}: a search takes steps of one model that all processes update together; use a plan with dp, "
            f"zero, tp, cp or a synchronous pp, such as --plan dp={max(1, plan.islands * (plan.dp or 1))}"
        )


def result_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a search found, of the summary that its ranks wrote."""
    found: dict[str, Any] = summary["rate_search"]
    return {"plan": summary["plan"], "status": summary["status"], **found}


def describe_search(result: Mapping[str, Any], lr: float) -> tuple[list[tuple[str, str]], str]:
    """Rows of rates and losses, and a sentence about the rate to begin with.

    Args:
        result: of ``result_of``.
        lr: what the recipe has.
    """
    rates: Sequence[float] = result["rates"]
    losses: Sequence[float] = result["losses"]
    every = -(-len(rates) // _ROWS)
    shown = sorted({*range(0, len(rates), every), *([len(rates) - 1] if rates else [])})
    rows = [(f"{rates[place]:.3g}", f"{losses[place]:.4f}") for place in shown]
    if result["suggestion"] is None:
        return rows, f"the loss fell at none of these rates, so none is suggested; the recipe has optim.lr = {lr:g}"
    return rows, (
        f"suggested: optim.lr = {result['suggestion']:.3g}, where the loss falls fastest; the recipe has {lr:g}. "
        "Nothing was trained"
    )
