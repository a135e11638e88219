"""How long a pipeline's step is, by closed forms: for a search through thousands of plans. ``simulate.py`` plays a schedule.

The forms assume equal stages; where stages differ the slowest rank sets the pace and every other is passed once (Zheng et al.
2022, arXiv:2201.12023, eq. 2). They are for the schedules of ``shoal.schedules``, whose step ends with an update of all ranks: a
zero-bubble schedule has no idle rank *between* its first and last cell, and yet the last rank begins p - 1 forwards late.
"""

from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.planner.job import ranks_of_stages
from shoal.planner.parts import StepParts


def pipeline_seconds(parts: StepParts, plan: Plan, *, overlaps_transfer: bool = True) -> float:
    """Seconds from the first cell of a step to its last, by the family's closed form."""
    pp, microbatches = plan.pp, parts.microbatches
    if pp == 1:
        return microbatches * sum(stage.forward + stage.backward for stage in parts.stages)
    moved = 0.0 if overlaps_transfer else parts.transfer
    ranks = [0.0] * pp
    for rank, stage in zip(ranks_of_stages(plan), parts.stages, strict=True):
        ranks[rank] += stage.forward + stage.backward + 2 * moved
    if schedule_facts(plan.schedule).is_asynchronous:
        return microbatches * max(ranks)
    # An activation and its gradient each pass all ranks, where nothing else is there to be done meanwhile.
    transfers = 2 * (pp - 1) * (parts.transfer - moved)
    return microbatches * max(ranks) + _idle(parts, plan, ranks, moved) + transfers


def _idle(parts: StepParts, plan: Plan, ranks: list[float], moved: float) -> float:
    """Seconds of a step beyond the work of its slowest rank; for weights' gradients that take no longer than a forward."""
    name, others, microbatches = plan.schedule or "1f1b", plan.pp - 1, parts.microbatches
    num_stages = len(parts.stages)
    chunks = num_stages // plan.pp
    forward = sum(stage.forward for stage in parts.stages) / num_stages + moved
    by_input = sum(stage.input for stage in parts.stages) / num_stages + moved
    weight = sum(stage.weight for stage in parts.stages) / num_stages
    is_long = microbatches >= 2 * plan.pp - 1
    if name == "zb-h1" or (name == "zb-h2" and not is_long):
        # Qi et al. 2024 (arXiv:2401.10241), section 2.2: weights' gradients fill what they can.
        return others * (forward + by_input) - min(others, microbatches - 1) * weight
    if name == "zb-h2":
        return others * max(forward, forward + by_input - 2 * weight)
    if name == "zbv":
        return others * max(forward, by_input, 2 * by_input - (2 if is_long else 1) * weight)
    if name in ("v-half", "v-min"):
        return _vee_idle(name, others, microbatches, forward, by_input, weight)
    if name in ("dualpipe", "dualpipev"):
        # (S/2 - 1)(F&B + B - 3W) for S stages, a pair taking as long as its parts (DeepSeek-V3, arXiv:2412.19437, Table 2).
        return max(0.0, (num_stages / 2 - 1) * (forward + 2 * by_input - weight))
    if name == "chimera":
        return (plan.pp - 2) / 2 * sum(ranks) / plan.pp
    # Filling and emptying passes every other rank once, a chunk of it at a time; a round of fewer microbatches than ranks waits.
    late = (chunks - 1) * max(0, plan.pp - microbatches) * (forward + by_input + weight)
    return (sum(ranks) - max(ranks)) / chunks + late


def _vee_idle(name: str, others: int, microbatches: int, forward: float, by_input: float, weight: float) -> float:
    """V-Half and V-Min (Qi et al. 2024, arXiv:2405.15362): blocks follow each other at the pace of their longest cells."""
    longest, work = max(forward, by_input), 2 * (forward + by_input + weight)
    fill, period = 2 * (forward + by_input), 6 * longest
    if name == "v-half":
        fill, period = fill - weight, 4 * longest + weight
    return others * fill + microbatches * max(0.0, period - work)
