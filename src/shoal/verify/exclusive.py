"""Options of a proof that exclude one another, checked without torch: a wrong request is answered at once."""

from shoal.core.errors import RequestError


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
