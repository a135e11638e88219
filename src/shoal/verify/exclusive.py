"""Options of a proof that exclude one another, checked without torch: a wrong request is answered at once."""

from collections.abc import Sequence

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule


def check_exclusive(*, has_plans: bool, all_plans: bool, mutants: bool, nproc: int | None, dtype: str | None) -> None:
    """Refuse several proofs in one request.

    Raises:
        RequestError: names what to leave out.
    """
    if sum((has_plans, all_plans, mutants)) > 1:
        raise RequestError("give one of --plan, --all and --mutants: each is a proof of its own")
    if mutants and (nproc is not None or dtype is not None):
        given = "--nproc" if nproc is not None else "--dtype"
        raise RequestError(f"--mutants brings the plan and the type that each bug shows in; leave {given} out")


def check_clocks(plans: Sequence[str]) -> None:
    """Refuse a request none of whose plans can be proved, because their rounds are by the clock.

    Raises:
        RequestError: a plan is none, or all of them are such.
    """
    found = [Plan.parse(text) for text in plans if text != "auto"]
    if found and len(found) == len(plans) and all(has_clock(plan) for plan in found):
        refuse_clock(found[0])


def has_clock(plan: Plan) -> bool:
    """True where islands meet every so many seconds."""
    return SyncRule.parse(plan.sync).seconds is not None


def refuse_clock(plan: Plan) -> None:
    """Say why such a plan cannot be proved.

    Raises:
        RequestError: always.
    """
    raise RequestError(
        f"plan {str(plan)!r}: rounds by the clock are at other steps in every run; prove sync=local:H, which does the same"
    )
