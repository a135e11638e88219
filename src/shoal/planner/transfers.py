"""What transfers between stages take of a pipeline's time, for closed forms: ``simulate.py`` plays them.

A software that waits for its transfers has them inside its passes. One that goes on computing has them between the passes of two
ranks, where a schedule hides them as far as the ranks have other cells meanwhile: GPipe has, 1F1B has none.
"""

from collections.abc import Sequence
from dataclasses import replace

from shoal.core.pipelines import DEFAULT_SCHEDULE
from shoal.core.plan import Plan
from shoal.planner.job import sum_by_rank
from shoal.planner.parts import StageTimes, StepParts

_NONE_AHEAD = ("1f1b", "pipedream-flush", "pipedream", "pipedream-vsync", "pipedream-2bw", "dualpipev")
"""Schedules that keep a microbatch in flight for each rank that is still to come, and whose backward passes are whole."""
_ROUNDING = 1e-12


def stages_with_transfers(parts: StepParts, plan: Plan) -> tuple[StageTimes, ...]:
    """The stages as their ranks spend time on them: with the transfers that a software waits for.

    Every pass takes something from another rank or hands something on, most do both, and both go on at once, as in
    ``send_forward_recv_backward`` of Megatron-LM (``core/pipeline_parallel/p2p_communication.py``): one transfer each.
    """
    moved = parts.transfer - parts.delay
    if not moved or plan.pp == 1:
        return parts.stages
    # Most stages are alike, and a search asks for thousands of pipelines.
    made: dict[int, StageTimes] = {}
    for times in parts.stages:
        if id(times) not in made:
            exposed = {**times.exposed, "pp": 2 * moved}
            made[id(times)] = replace(times, forward=times.forward + moved, input=times.input + moved, exposed=exposed)
    return tuple(made[id(times)] for times in parts.stages)


def waiting_seconds(parts: StepParts, plan: Plan) -> float:
    """What a microbatch in the middle of a step takes beyond the work of the slowest rank, because ranks wait for transfers.

    Where each form is from: cells of a schedule follow each other in circles, and the longest mean of a circle is the pace of all
    (Baccelli et al. 1992, Synchronization and Linearity, theorem 3.23). The circles were read off the orders of
    ``shoal.schedules``, and tests hold the forms to the played schedules.
    """
    name, delay, pp = plan.schedule or DEFAULT_SCHEDULE, parts.delay, plan.pp
    if not delay:
        return 0.0
    ranks = sum_by_rank(plan, [stage.forward + stage.backward for stage in parts.stages])
    if name in _NONE_AHEAD:
        return _pace(ranks, [0.0] * pp, delay) - max(ranks)
    if name == "zb-h1":
        weights = sum_by_rank(plan, [stage.weight for stage in parts.stages])
        passes = [work - weight for work, weight in zip(ranks, weights, strict=True)]
        return max(0.0, _pace(passes, weights, delay) - max(ranks))
    num_stages, others = len(parts.stages), (pp - 1) / pp
    forward = sum(stage.forward for stage in parts.stages) / num_stages
    weight = sum(stage.weight for stage in parts.stages) / num_stages
    # What the slowest rank has more to do than the mean: circles through all ranks have that much room.
    room = max(ranks) - sum(ranks) / pp
    if name == "interleaved":
        # A round of as many microbatches as ranks comes back to its first rank; neighbours are two forwards apart.
        turns = (num_stages // pp - 1) * max(0.0, delay - forward)
        return turns + max(0.0, others * (delay - sum(ranks) / num_stages / 2) - room)
    if name == "zbv":
        # Gradients of one rank's two stages pass all ranks, and the rest is done by the first.
        return max(0.0, others * 2 * (delay - forward - weight) - room)
    # Transfers in the longest circle of the others, over its microbatches; GPipe and what goes breadth first have no circle.
    share = {"v-half": 2.0 if pp > 2 else 0.0, "v-min": 6 * others, "dualpipe": others, "chimera": 2 * (pp - 2) / pp}
    return share.get(name, 0.0) * delay


def _pace(passes: Sequence[float], extra: Sequence[float], delay: float) -> float:
    """Seconds of a microbatch, where every rank is one forward ahead of the next.

    Ranks r to r + k then go round k + 1 microbatches at a time: the passes of each, two transfers between neighbours, and on
    the first of them what stands between two of its passes (``extra``). The longest mean of all these circles is found by
    raising a pace for as long as some circle is slower than it (Dinkelbach 1967, Management Science 13, 492-498).
    """
    pace = max(one + other for one, other in zip(passes, extra, strict=True))
    while True:
        behind, num_ranks, most, most_ranks = 0.0, 0, 0.0, 1
        for seconds, between in zip(passes, extra, strict=True):
            if not num_ranks or between - 2 * delay > behind:
                behind, num_ranks = between - 2 * delay, 0
            behind, num_ranks = behind + seconds + 2 * delay - pace, num_ranks + 1
            if behind > most:
                most, most_ranks = behind, num_ranks
        # Asked this way, times that are no numbers come to an end too.
        if not most > _ROUNDING * pace:
            return pace
        pace += most / most_ranks
