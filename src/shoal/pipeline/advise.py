"""Which stages are worth several ranks: PipeDream's planner asked about a model, in the words of a plan."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from shoal.core.pipelines import write_replicas
from shoal.pipeline.config import PipelineConfig
from shoal.pipeline.estimate import estimate_work
from shoal.pipeline.measure import measure_costs
from shoal.pipeline.split import ReplicatedSplit, UnitCost, split_replicated
from shoal.pipeline.units import Unit


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
    return _describe(found, units, num_ranks=num_ranks, config=config)


def _of_microbatch(cost: UnitCost, share: float, num_microbatches: int) -> UnitCost:
    """The costs of a whole microbatch. Gradients are summed once per step, of which a microbatch bears its part."""
    return replace(
        cost,
        seconds=cost.seconds * share,
        weight_bytes=-(-cost.weight_bytes // num_microbatches),
        boundary_bytes=round(cost.boundary_bytes * share),
    )


def _describe(found: ReplicatedSplit, units: Sequence[Unit], *, num_ranks: int, config: PipelineConfig) -> str:
    each = f"{found.slowest_seconds * 1e3:.3g} ms per microbatch by {config.balance} cost"
    if len(found.replicas) == 1:
        return f"pp: over {config.network} one stage on all {num_ranks} ranks is fastest, {each}: dp={num_ranks}"
    places = ", ".join(units[start].path for start in found.starts[1:])
    if max(found.replicas) == 1:
        return f"pp: over {config.network} no stage is worth a second rank, {each}: stages from {places} on"
    return f"pp: over {config.network} replicas={write_replicas(found.replicas)} is fastest, {each}: stages from {places} on"
