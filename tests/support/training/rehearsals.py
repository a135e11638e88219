"""All ranks of a plan rehearsed in this process, one after another."""

from shoal.comm.rehearsal import rehearsed_world
from shoal.engine.resolve import resolve_plan
from shoal.tuning.rehearsal import trace_rank


def rehearse_rank(subject, plan, rank):
    plan = resolve_plan(subject.recipe.train, plan).plan
    with rehearsed_world(rank, plan.world_size) as world:
        return trace_rank(subject, plan, world=world)


def rehearse_ranks(subject, plan):
    size = resolve_plan(subject.recipe.train, plan).plan.world_size
    return tuple(rehearse_rank(subject, plan, rank) for rank in range(size))
