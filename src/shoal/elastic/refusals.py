"""What the ``[elastic]`` section asks for and a plan cannot do, found before a process starts. No torch."""

from collections.abc import Iterator

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.elastic.config import GroupConfig

EXECUTED = frozenset({"restart", "shrink"})
"""The modes that a run obeys. One that is not here is understood and refused, never ignored."""


def check_group(config: GroupConfig, plan: Plan, *, rate_rule: str) -> None:
    """Refuse settings of an elastic run that do not fit the plan or each other.

    Raises:
        RequestError: lists them with their fixes.
    """
    found = list(group_problems(config, plan, rate_rule=rate_rule))
    if found:
        raise RequestError("\n".join(f"plan {str(plan)!r}: {problem}" for problem in found))


def group_problems(config: GroupConfig, plan: Plan, *, rate_rule: str) -> Iterator[str]:
    """Settings of an elastic run that do not fit the plan or each other, each with its fix.

    Args:
        config: the recipe's section.
        plan: with its ``dp``.
        rate_rule: the recipe's ``optim.scale``.
    """
    if config.mode == "restart":
        yield from _without_effect(config)
        return
    if config.mode not in EXECUTED:
        yield f"elastic.mode {config.mode} is not executed yet; use restart, with max_restarts"
    if plan.ps:
        yield (
            f"elastic.mode shrink is for replicas that step together, and ps={plan.ps} has workers that come and go anyway; "
            "leave mode out"
        )
        return
    dp = plan.dp or 1
    max_dp = dp if config.max_dp is None else config.max_dp
    if config.min_dp > dp:
        yield f"elastic.min_dp {config.min_dp} is more than the plan's dp={dp}: it could never start; set min_dp to {dp} or less"
    elif max_dp < config.min_dp:
        yield f"elastic.max_dp {max_dp} is less than elastic.min_dp {config.min_dp}; swap or drop one of them"
    if max_dp > dp and config.batch == "hold":
        yield (
            f"elastic.max_dp {max_dp} is more than the plan's dp={dp}, and with batch hold there are {dp} shares of the batch "
            f"and no more; set max_dp to {dp}, plan dp={max_dp}, or set elastic.batch to scale"
        )
    if config.batch == "scale" and rate_rule == "none":
        yield (
            "elastic.batch scale changes the global batch, and optim.scale is none: the rate would stay; set optim.scale to "
            "linear or sqrt with optim.scale_base, or elastic.batch to hold"
        )
    # Of islands it is not the number that is in the way: see ``trainer/elastic/limits.py``.
    if max_dp == 1 and config.spares == 0 and plan.with_islands.islands == 1:
        yield (
            f"elastic.mode shrink has nobody to go on with where one replica is present (dp={dp}, max_dp {max_dp}, spares 0); "
            "plan dp=2 or more, or set elastic.spares"
        )


def _without_effect(config: GroupConfig) -> Iterator[str]:
    asked = {
        "min_dp": config.min_dp > 1,
        "max_dp": config.max_dp is not None,
        "spares": config.spares > 0,
        "rejoin": config.rejoin,
        "batch": config.batch != "hold",
        "drop_stragglers": config.drop_stragglers,
    }
    for key, is_asked in asked.items():
        if is_asked:
            yield (
                f"elastic.{key} {getattr(config, key)} is for elastic.mode shrink, and mode is restart, which has all replicas "
                f"or none; set mode to shrink, or leave {key} out"
            )
