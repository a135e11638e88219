"""How much is simulated at most: what would take longer than about half a minute is refused, with the largest that is taken.

Python works through the cells of a schedule one by one, to find their order and to play them; numpy plays many steps and many
replicas beside each other. So a schedule has a number of cells at most, and steps by what a step costs.
"""

from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.planner.simulation.conditions import Conditions

FLOWING_STEPS = 4
"""Steps that are played of a schedule without a flush: the third has others before and behind it, and stands for all."""
MOST_CELLS = 200_000
"""Cells of a schedule. Each takes about 0.15 ms: building it, its order, and playing it."""
_MOST_WORK = 1e9
"""Cells times replicas times steps, at about 10 ns each where numpy plays them."""
_STEP_WORK = 1e4
"""What a step with draws of its own costs beside its cells, in cells: generators and the tail."""
_CELL_WORK = 1e4
"""What a cell costs, in cells that numpy plays, where Python plays step by step: a schedule that flows."""
_STEADY_WORK = 1e3
"""What a step costs that is like the first."""


def check_cells(plan: Plan, microbatches: int) -> None:
    """Refuse a schedule that has too many cells to be played.

    Args:
        plan: how the pipeline is laid out.
        microbatches: of a replica and step.

    Raises:
        RequestError: says how many microbatches can be played.
    """
    each = count_cells(plan, 1)
    if each * microbatches > MOST_CELLS:
        most = max(1, MOST_CELLS // each)
        raise RequestError(
            f"{microbatches} microbatches over {max(1, plan.num_stages)} stage(s) are {each * microbatches} cells to play, and "
            f"{MOST_CELLS} are played at most; give {most} microbatches or fewer: a lower --global-batch, a larger "
            f"train.micro_batch, or microbatches={most} in the plan"
        )


def check_steps(
    plan: Plan, microbatches: int, conditions: Conditions, *, num_steps: int, num_sites: int = 1, option: str
) -> None:
    """Refuse more steps than can be played in a while.

    Args:
        plan: of one site.
        microbatches: of a replica and step.
        conditions: what makes steps unlike.
        num_steps: that are asked for.
        num_sites: that are played.
        option: the word on the command line that says them.

    Raises:
        RequestError: says the largest number that is taken.
    """
    most = most_steps(plan, microbatches, conditions, num_sites=num_sites)
    if num_steps > most:
        draws = " with draws of their own (--jitter, --link-jitter)" if conditions.varies else ""
        raise RequestError(
            f"{option} is {num_steps}, and of this plan {most} steps{draws} are played at most; give {option} {most} or fewer"
        )


def most_steps(plan: Plan, microbatches: int, conditions: Conditions, *, num_sites: int = 1) -> int:
    """Steps that are played at most, 1 or more."""
    cells = count_cells(plan, microbatches)
    if not conditions.varies:
        work = _STEADY_WORK
    elif _flows(plan):
        work = cells * _CELL_WORK
    else:
        work = cells * plan.degree(Axis.DATA) + plan.world_size + _STEP_WORK
    return max(1, int(_MOST_WORK / (work * num_sites)))


def count_cells(plan: Plan, microbatches: int) -> int:
    """Cells that are played of a plan: a forward and a backward pass of each microbatch in each stage; halves count once."""
    return 2 * max(1, plan.num_stages) * microbatches * (FLOWING_STEPS if _flows(plan) else 1)


def _flows(plan: Plan) -> bool:
    return plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous
