"""Where a plan cuts a model into stages: asked before a run, by a dry run, by every rank and by a proof, with one answer."""

from collections.abc import Sequence

import torch
from torch import nn

from shoal.comm.world import World
from shoal.core.plan import Plan
from shoal.data.source import Splits
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.pipeline.build import Stages, find_stages
from shoal.pipeline.config import PipelineConfig
from shoal.trainer.layout import schedule_of


def example_of(data: Splits) -> tuple[torch.Tensor, ...]:
    """Inputs of two samples, for looking at a module; of one where there is no second."""
    return tuple(data.train.collate(range(min(2, len(data.train)))).inputs)


def look_at_stages(
    model: nn.Module,
    data: Splits,
    analysis: ModuleAnalysis,
    *,
    plan: Plan,
    config: PipelineConfig,
    global_batch: int,
    world: World | None = None,
) -> Stages:
    """Where a plan cuts a plain model; the same wherever it is asked.

    Args:
        model: as one process builds it.
        data: what it will be trained on.
        analysis: what was found in it.
        plan: derived, so that its schedule is known.
        config: the recipe's wishes.
        global_batch: samples of a step; a bound on memory is one on the activations of a microbatch of them.
        world: the ranks, which must agree where costs are measured; None for one process that only looks.

    Raises:
        RequestError: it has fewer places to be cut at than the schedule has stages.
    """

    def agree(starts: Sequence[int]) -> Sequence[int]:
        if world is None or world.size == 1:
            return starts
        told = torch.tensor(starts if world.is_first else [0] * len(starts), device=world.device)
        return [int(start) for start in world.all_reduce_(told).tolist()]

    return find_stages(
        model,
        example_of(data),
        analysis,
        schedule=schedule_of(plan),
        config=config,
        agree=agree,
        samples=max(1, global_batch // (plan.num_shares * (plan.microbatches or 1))),
    )
