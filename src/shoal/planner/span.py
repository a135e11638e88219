"""How long a pipeline's step is, by closed forms: for a search through thousands of plans. ``simulate.py`` plays a schedule.

The closed forms (reference: Narayanan et al. 2021 for 1F1B and interleaved; Qi et al. 2024, arXiv:2401.10241, for the zero-bubble
families; DeepSeek-V3, arXiv:2412.19437, for DualPipe) assume equal stages; where stages differ the slowest sets the pace and
every other is passed once (Zheng et al. 2022, arXiv:2201.12023, eq. 2).
"""

from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.planner.parts import StepParts


def pipeline_seconds(parts: StepParts, plan: Plan, *, overlaps_transfer: bool = True) -> float:
    """Seconds from the first cell of a step to its last, by the family's closed form."""
    pp, chunks, microbatches = plan.pp, plan.chunks or 1, parts.microbatches
    if pp == 1:
        return microbatches * sum(stage.forward + stage.backward for stage in parts.stages)
    moved = 0.0 if overlaps_transfer else 2 * parts.transfer
    ranks = [0.0] * pp
    forward, weight = [0.0] * pp, [0.0] * pp
    for at, stage in enumerate(parts.stages):
        rank = _rank_of(at, pp, plan.schedule)
        ranks[rank] += stage.forward + stage.backward + moved
        forward[rank] += stage.forward
        weight[rank] += stage.weight
    slowest, mean = max(ranks), sum(ranks) / pp
    # Filling and emptying passes every other rank once, a chunk of it at a time.
    fill = (sum(ranks) - slowest) / chunks + 2 * (pp - 1) * (parts.transfer - moved / 2)
    name = plan.schedule or "1f1b"
    if name in ("zb-h1",):
        fill = max(0.0, fill - 2 * (pp - 1) * max(weight))
    elif name in ("zb-h2", "zbv"):
        fill = 0.0
    elif name in ("v-half",):
        fill /= 2
    elif name in ("v-min",):
        fill *= 2 / 3
    elif name in ("dualpipe", "dualpipev"):
        fill = max(0.0, (pp / 2 - 1) * (2 * mean - 3 * max(weight)) / chunks)
    elif name == "chimera":
        fill = (pp - 2) / 2 * mean
    elif name in ("interleaved", "looped-bfs") and microbatches % pp:
        # A last round that is not full takes as long as a full one (Calculon, llm.py; planner reference, section 2.2).
        fill += (chunks - 1) * (pp - microbatches % pp) * mean / chunks
    elif schedule_facts(plan.schedule).is_asynchronous:
        fill = 0.0
    return microbatches * slowest + fill


def _rank_of(stage: int, pp: int, schedule: str | None) -> int:
    if schedule in ("zbv", "v-half", "v-min", "dualpipev"):
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp
