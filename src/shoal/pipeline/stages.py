"""Where the stages of a run begin: at the places that the recipe names, or at those that balance them.

Where a module may be cut is tried on an example, in the plain module, which is left as it was. Whether a stage may begin at a
unit does not depend on where other stages begin: everything from there on must follow from what that unit is given and from the
model's own inputs. So places are tried one at a time, and only those that a cut would use.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.core.pipelines import write_replicas
from shoal.pipeline.config import PipelineConfig
from shoal.pipeline.cut import IllegalCut, StagedModule
from shoal.pipeline.split import ReplicatedSplit, StageMemory, UnitCost, parse_starts, split, split_replicated
from shoal.pipeline.unit_costs import estimate_work, measure_costs
from shoal.pipeline.units import Unit
from shoal.schedules.player import peak_activations_by_stage
from shoal.schedules.schedule import Grid, Schedule
from shoal.schedules.versions import peak_versions

_MOST_TRIED = 64
"""Places that are tried for a message; every one of them takes a few forward passes of the example."""
_MOST_NAMED = 8


def find_illegal(
    model: nn.Module, units: Sequence[Unit], starts: Sequence[int], example: tuple[Tensor, ...]
) -> IllegalCut | None:
    """What is wrong with a cut, with the first place that is; None where it is right."""
    chain = StagedModule(model, units, starts)
    try:
        chain.prove(example)
    except IllegalCut as error:
        return error
    finally:
        chain.undo()
    return None


def choose_legal(
    propose: Callable[[frozenset[int]], tuple[int, ...]],
    model: nn.Module,
    units: Sequence[Unit],
    example: tuple[Tensor, ...],
) -> tuple[int, ...]:
    """The best cut of which every place is legal.

    Args:
        propose: gives the best cut that begins no stage at these units.
        model: the whole module.
        units: its chain of calls.
        example: its inputs.

    Raises:
        RequestError: there is none; names the places that are legal and says what is wrong with another.
    """
    illegal: dict[int, IllegalCut] = {}
    while True:
        try:
            starts = propose(frozenset(illegal))
        except RequestError:
            if not illegal:
                raise
            raise _describe(propose, illegal[min(illegal)], model, units, example) from None
        found = find_illegal(model, units, starts, example)
        if found is None:
            return starts
        alone = _illegal_alone(model, units, starts, example) if len(starts) > 2 else {}
        # Where every place is legal by itself and all together are not, the message's own is the best guess.
        new = alone or {found.start: found}
        assert illegal.keys().isdisjoint(new), "a place that was excluded was proposed again"
        illegal |= new


def _illegal_alone(
    model: nn.Module, units: Sequence[Unit], starts: Sequence[int], example: tuple[Tensor, ...]
) -> dict[int, IllegalCut]:
    """The places of a cut that are illegal whatever the others are: an error on the way may come of another than it names."""
    tried = {place: find_illegal(model, units, (0, place), example) for place in starts[1:]}
    return {place: found for place, found in tried.items() if found is not None}


def _describe(
    propose: Callable[[frozenset[int]], tuple[int, ...]],
    first: IllegalCut,
    model: nn.Module,
    units: Sequence[Unit],
    example: tuple[Tensor, ...],
) -> RequestError:
    """Why there is no cut, by the places that are legal alone."""
    legal = _legal_places(model, units, example)
    try:
        propose(frozenset(range(1, len(units))) - frozenset(legal))
    except RequestError as error:
        return RequestError(f"{error}. At another place: {first}")
    raise AssertionError("fewer places gave a cut where more did not")


def _legal_places(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> list[int]:
    tried = [place for place, unit in enumerate(units) if place > 0 and unit.is_once][:_MOST_TRIED]
    return [place for place in tried if find_illegal(model, units, (0, place), example) is None]


def name_legal(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> str:
    """A sentence with the places where a stage can begin."""
    legal = [units[place].path for place in _legal_places(model, units, example)]
    if not legal:
        return "There is no unit at which this module can be cut: leave pp out"
    more = f" and {len(legal) - _MOST_NAMED} more" if len(legal) > _MOST_NAMED else ""
    return f"Stages can begin at {', '.join(map(repr, legal[:_MOST_NAMED]))}{more}"


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


def advise_replicas(
    model: nn.Module,
    units: Sequence[Unit],
    example: tuple[Tensor, ...],
    *,
    num_ranks: int,
    num_microbatches: int,
    samples: int,
    config: PipelineConfig,
) -> str:
    """The stages and ranks that take the least time per microbatch over ``config.network``, as a line for people.

    Args:
        model: the whole module; nothing stays of the passes that are run.
        units: its chain of calls.
        example: inputs of a few samples, along dim 0 of the first of them.
        num_ranks: of the pipeline; all are used.
        num_microbatches: of a step.
        samples: of a microbatch.
        config: what the recipe says; it names a network.
    """
    assert config.network_bytes is not None
    costs = (measure_costs if config.balance == "measured" else estimate_work)(model, units, example)
    share = samples / len(example[0])
    found = split_replicated(
        [_of_microbatch(cost, share, num_microbatches) for cost in costs], num_ranks, 1.0 / config.network_bytes
    )
    return _describe_replicas(found, units, num_ranks=num_ranks, config=config)


def _of_microbatch(cost: UnitCost, share: float, num_microbatches: int) -> UnitCost:
    """The costs of a whole microbatch. Gradients are summed once per step, of which a microbatch bears its part."""
    return replace(
        cost,
        seconds=cost.seconds * share,
        weight_bytes=-(-cost.weight_bytes // num_microbatches),
        boundary_bytes=round(cost.boundary_bytes * share),
    )


def _describe_replicas(found: ReplicatedSplit, units: Sequence[Unit], *, num_ranks: int, config: PipelineConfig) -> str:
    each = f"{found.slowest_seconds * 1e3:.3g} ms per microbatch by {config.balance} cost"
    if len(found.replicas) == 1:
        return f"pp: over {config.network} one stage on all {num_ranks} ranks is fastest, {each}: dp={num_ranks}"
    places = ", ".join(units[start].path for start in found.starts[1:])
    if max(found.replicas) == 1:
        return f"pp: over {config.network} no stage is worth a second rank, {each}: stages from {places} on"
    return f"pp: over {config.network} replicas={write_replicas(found.replicas)} is fastest, {each}: stages from {places} on"
