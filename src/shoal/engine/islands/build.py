"""What brings an island together with the others, from a plan and what a rank updates."""

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from shoal.comm.mesh import Mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.engine.config import Settings
from shoal.engine.islands.together import Islands
from shoal.engine.stop import StopRequest
from shoal.optim.build import reset_state
from shoal.parallel import batchnorm
from shoal.parallel.data import Reduction
from shoal.replicas.build import Cut, build_codings, build_policy
from shoal.replicas.policy import Island


def build_islands(
    reduction: Reduction,
    optimizer: Optimizer,
    model: nn.Module,
    *,
    plan: Plan,
    world: World,
    mesh: Mesh,
    saved_names: Mapping[str, str],
    settings: Settings,
    stop: StopRequest,
) -> Islands:
    """One rank's part in bringing islands together. All ranks call it.

    Args:
        reduction: knows what this rank updates.
        optimizer: that updates it.
        model: of this rank.
        plan: with more than one island.
        world: all ranks.
        mesh: of the plan.
        saved_names: what checkpoints call each trained parameter of the whole model.
        settings: of the recipe.
        stop: this rank's request to stop, which the other islands hear of.

    Raises:
        RequestError: the policy does not fit the model.
    """
    rule = SyncRule.parse(plan.sync)
    channel = mesh.channel(Axis.ISLAND)
    weights = {name: parameter.detach() for name, parameter in reduction.updated.items()}
    order = sorted(saved_names)
    # Every rank makes it, or none: the rule is the plan's.
    overlaps = rule.kind == "stream" and rule.delay > 0
    background = mesh.add_background(world, Axis.ISLAND) if overlaps else None
    cut = Cut(placements=reduction.placements, order=order, channel=mesh.channel(Axis.DATA))
    codings = build_codings(
        rule,
        plan.compress,
        settings.compression,
        weights,
        background or channel,
        settings.train.seed,
        cut=cut if plan.zero else None,
    )
    island = Island(
        channel=channel,
        weights=weights,
        seed=settings.train.seed,
        inside=mesh.everyone,
        background=background,
        sums=codings.sums,
        shards=codings.shards,
        coding=codings.coding,
        rank=world.rank,
        deadline_seconds=world.deadline_seconds,
    )
    return Islands(
        rule=rule,
        config=settings.replicas,
        policy=build_policy(island, rule, settings.replicas, order=order),
        channel=channel,
        inside=mesh.everyone,
        weights=weights,
        placements=reduction.placements,
        buffers=batchnorm.running_statistics(model),
        saved_names=saved_names,
        seed=settings.train.seed,
        stop=stop,
        device=world.device,
        publish=reduction.publish,
        forget=lambda: reset_state(optimizer),
        sums=codings.sums,
        shards=codings.shards,
        goes_on=settings.train.nonfinite == "skip",
    )
