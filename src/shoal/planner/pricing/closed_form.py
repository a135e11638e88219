"""How long a pipeline's step is, by closed forms: for a search through thousands of plans. ``simulation/`` plays a schedule.

The forms assume equal stages; where stages differ the slowest rank sets the pace and every other is passed once (Zheng et al.
2022, arXiv:2201.12023, eq. 2). They are for the schedules of ``shoal.schedules``, whose step ends with an update of all ranks:
a zero-bubble schedule has no idle rank *between* its first and last cell, and yet the last rank begins p - 1 forwards late.

Transfers between stages have forms of their own. A software that waits for its transfers has them inside its passes. One that
goes on computing has them between the passes of two ranks, where a schedule hides them as far as the ranks have other cells
meanwhile: GPipe has, 1F1B has none.
"""

from collections.abc import Sequence
from dataclasses import replace

from shoal.core.pipelines import DEFAULT_SCHEDULE, schedule_facts
from shoal.core.plan import Plan
from shoal.planner.pricing.cost import StageTimes, StepParts
from shoal.planner.pricing.job import sum_by_rank


def pipeline_seconds(parts: StepParts, plan: Plan) -> float:
    """Seconds from the first cell of a step to its last, by the family's closed form."""
    pp, microbatches = plan.pp, parts.microbatches
    if pp == 1:
        return microbatches * sum(stage.forward + stage.backward for stage in parts.stages)
    stages = stages_with_transfers(parts, plan)
    ranks = sum_by_rank(plan, [stage.forward + stage.backward for stage in stages])
    waiting = waiting_seconds(parts, plan)
    if schedule_facts(plan.schedule).is_asynchronous:
        return microbatches * (max(ranks) + waiting)
    # As many microbatches as there are ranks fill the pipeline, and what they wait for is idle time of its own.
    late = max(0, microbatches - pp) * waiting
    if plan.schedule in ("gpipe", "looped-bfs"):
        return late + sum(
            _phase_seconds(plan, each, microbatches, parts.delay)
            for each in ([stage.forward for stage in stages], [stage.backward for stage in stages])
        )
    return microbatches * max(ranks) + _idle(plan, stages, ranks, microbatches, parts.delay) + late


def _phase_seconds(plan: Plan, stages: Sequence[float], microbatches: int, delay: float) -> float:
    """All forward passes, or all backward passes, of a schedule that has the one after the other."""
    ranks = sum_by_rank(plan, stages)
    chunks = len(stages) // plan.pp
    each = max(ranks) / chunks
    # The first microbatch is back at its first rank after a pass and a transfer of each; a rank that is done before waits.
    turn = max(0.0, plan.pp * (each + delay) - microbatches * each)
    others = (sum(ranks) - max(ranks)) / chunks + (plan.pp - 1) * delay
    return microbatches * max(ranks) + others + (chunks - 1) * turn


def _idle(plan: Plan, stages: Sequence[StageTimes], ranks: list[float], microbatches: int, delay: float) -> float:
    """Seconds of a step beyond the work of its slowest rank; for weights' gradients that take no longer than a forward.

    A transfer of ``delay`` seconds that nothing hides counts as often as it stands on the longest way through the cells by which
    a schedule fills and empties.
    """
    name, others = plan.schedule or DEFAULT_SCHEDULE, plan.pp - 1
    num_stages = len(stages)
    chunks = num_stages // plan.pp
    forward = sum(stage.forward for stage in stages) / num_stages
    by_input = sum(stage.input for stage in stages) / num_stages
    weight = sum(stage.weight for stage in stages) / num_stages
    is_long = microbatches >= 2 * plan.pp - 1
    # Microbatches that ranks have to wait for behind the first two, until all ranks are busy; each is a way there and back.
    behind = 2 * delay * max(0, min(microbatches - 2, others))
    if name == "zb-h1":
        # Qi et al. 2024 (arXiv:2401.10241), section 2.2: weights' gradients fill what they can.
        return others * (forward + by_input + 2 * delay) - min(others, microbatches - 1) * weight + behind
    if name == "zb-h2" and not is_long:
        return others * (forward + by_input + 2 * delay) - min(others, microbatches - 1) * weight
    if name == "zb-h2":
        return others * max(forward + delay, forward + by_input - 2 * weight + 2 * delay)
    if name == "zbv":
        filled = 2 * by_input - (2 if is_long else 1) * weight + 4 * delay
        return max(others * max(forward + 3 * delay, by_input + 5 * delay), others * filled + behind)
    if name in ("v-half", "v-min"):
        return _vee_idle(name, others, microbatches, (forward, by_input, weight), delay)
    if name in ("dualpipe", "dualpipev"):
        # (S/2 - 1)(F&B + B - 3W) for S stages, a pair taking as long as its parts (DeepSeek-V3, arXiv:2412.19437, Table 2).
        return max(0.0, (num_stages / 2 - 1) * (forward + 2 * by_input - weight)) + 2 * others * chunks * delay
    if name == "chimera":
        return (plan.pp - 2) / 2 * sum(ranks) / plan.pp + 3 * others * delay
    # Filling and emptying passes every other rank once, a chunk of it at a time.
    filling = (sum(ranks) - max(ranks)) / chunks
    if name == "interleaved":
        # A round of fewer microbatches than ranks waits.
        late = (chunks - 1) * max(0, plan.pp - microbatches) * (forward + by_input + weight)
        # An activation passes all stages, and its gradient comes back through all.
        return filling + late + 2 * (num_stages - 1) * delay
    return filling + 2 * (others + max(0, min(microbatches, plan.pp) - 2)) * delay


def _vee_idle(name: str, others: int, microbatches: int, times: tuple[float, float, float], delay: float) -> float:
    """V-Half and V-Min (Qi et al. 2024, arXiv:2405.15362): blocks follow each other at the pace of their longest cells."""
    forward, by_input, weight = times
    longest, work = max(forward, by_input), 2 * (forward + by_input + weight)
    fill, period, transfers = 2 * (forward + by_input), 6 * longest, 10
    if name == "v-half":
        fill, period, transfers = fill - weight, 4 * longest + weight, 6
    return others * (fill + transfers * delay) + microbatches * max(0.0, period - work)


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
