"""What a run with parameter servers cannot be on several hosts. No torch: it is said before a process starts."""

from shoal.core.errors import RequestError
from shoal.core.plan import Plan

HOST_RANK = "shoal.serverrun.hostrank"
"""What a process of such a run is."""


def refuse_server_hosts(plan: Plan) -> None:
    """Refuse workers of several processes.

    Raises:
        RequestError: says what to change.
    """
    if plan.ranks_per_replica > 1:
        raise RequestError(
            f"plan {str(plan)!r}: a worker is a group of {plan.ranks_per_replica} processes, and with --hosts roles are one "
            "process each; leave tp, cp and pp out"
        )
