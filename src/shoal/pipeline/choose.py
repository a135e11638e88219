"""Where the stages of a run begin: at the places that the recipe names, or at those that balance them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.core.pipelines import write_replicas
from shoal.pipeline.config import PipelineConfig
from shoal.pipeline.estimate import estimate_work
from shoal.pipeline.legal import choose_legal
from shoal.pipeline.measure import measure_costs
from shoal.pipeline.split import StageMemory, UnitCost, parse_starts, split
from shoal.pipeline.units import Unit
from shoal.schedules.grid import Grid
from shoal.schedules.pricing import peak_activations_by_stage
from shoal.schedules.schedule import Schedule
from shoal.schedules.versions import peak_versions

_KEY = "pipeline.stages"

Agree = Callable[[Sequence[int]], Sequence[int]]
"""Gives the first rank's numbers to every rank."""


def choose_starts(
    model: nn.Module,
    units: Sequence[Unit],
    example: tuple[Tensor, ...],
    *,
    schedule: Schedule,
    config: PipelineConfig,
    agree: Agree = tuple,
    samples: int | None = None,
) -> tuple[int, ...]:
    """The index of each stage's first unit, the same on every rank; the first is 0.

    Args:
        model: the whole module; nothing stays of the passes that are run.
        units: its chain of calls.
        example: inputs of a few samples, along dim 0 of the first of them.
        schedule: of one step, also where steps follow one another without a flush: a resumed run must find the same cut.
        config: what the recipe says.
        agree: called on every rank where costs are measured, because each rank measures others.
        samples: of a microbatch; activations of the example are taken for a microbatch's when it is left out.

    Raises:
        RequestError: the recipe's places are wrong or not as many as the schedule has stages, there are fewer legal places than
            stages, or no cut is within memory.
    """
    grid = schedule.grid
    if config.stages:
        return _named(config.stages, units, grid)
    is_measured = config.balance == "measured"
    costs = (measure_costs if is_measured else estimate_work)(model, units, example)
    if samples is not None:
        costs = tuple(_scaled(cost, samples, len(example[0])) for cost in costs)
    memory = None if config.memory_bytes is None else stage_memory(schedule, config.memory_bytes)
    # Whether there is a cut depends on bytes, which are alike everywhere: no rank is refused while others wait for it to agree.
    replicas = grid.replicas or None

    def propose(excluded: frozenset[int]) -> tuple[int, ...]:
        allowed = [
            replace(cost, can_start=cost.can_start and place not in excluded) for place, cost in enumerate(costs)
        ]
        return split(allowed, grid.num_stages, num_chunks=grid.chunks, memory=memory, replicas=replicas).starts

    starts = choose_legal(propose, model, units, example)
    return tuple(agree(starts)) if is_measured else starts


def stage_memory(schedule: Schedule, rank_bytes: int) -> tuple[StageMemory, ...]:
    """What each stage may hold when its rank may hold so much: the stages of a rank have equal shares."""
    activations, versions = peak_activations_by_stage(schedule), peak_versions(schedule)
    ranks_of = [schedule.grid.ranks_of(stage) for stage in range(schedule.grid.num_stages)]
    return tuple(
        StageMemory(
            limit_bytes=min(rank_bytes // len(schedule.grid.stages_of(rank)) for rank in ranks),
            num_microbatches=activations[stage],
            num_versions=max(versions[rank] for rank in ranks),
        )
        for stage, ranks in enumerate(ranks_of)
    )


def _named(texts: Sequence[str], units: Sequence[Unit], grid: Grid) -> tuple[int, ...]:
    starts = parse_starts(texts, units, key=_KEY)
    if len(starts) != grid.num_stages:
        wants = f"pp={grid.num_ranks}" + (f" with {grid.chunks} chunks" if grid.chunks > 1 else "")
        if grid.replicas:
            wants = f"replicas={write_replicas(grid.replicas)}"
        named, missing = len(starts) - 1, grid.num_stages - 1
        raise RequestError(
            f"{_KEY} names {named} place{'' if named == 1 else 's'} after the first, which makes {len(starts)} "
            f"stage{'' if len(starts) == 1 else 's'}, and {wants} has {grid.num_stages}; name {missing}, or leave {_KEY} out"
        )
    return starts


def _scaled(cost: UnitCost, samples: int, of: int) -> UnitCost:
    """The bytes of so many samples, rounded up, from those of others. Time is left: only its ratios matter."""
    return replace(
        cost,
        activation_bytes=-(-cost.activation_bytes * samples // of),
        boundary_bytes=-(-cost.boundary_bytes * samples // of),
    )
