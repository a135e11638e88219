"""What a simulation plays: the recipe's model traced into a chain, and its plan priced on the cluster, in time and in bytes."""

from dataclasses import dataclass, replace

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.costs.layers import ModelCosts
from shoal.planner.pricing.cost import StepParts, price_parts
from shoal.planner.pricing.job import Job, count_stages
from shoal.planner.pricing.memory import price_memory, rank_kept_bytes
from shoal.planner.simulation.memory import Held, StepBytes
from shoal.planner.simulation.step import schedule_for
from shoal.tuning.planned_model import chain_for, check_experts, facts_for
from shoal.tuning.planning import job_on
from shoal.tuning.simulation_request import Asked


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A step of one site in seconds and bytes."""

    parts: StepParts
    needed: StepBytes
    weight_bytes: float
    """Of the whole model, as sites exchange it."""
    tokens: float
    """Of one sample."""


def price_asked(asked: Asked) -> Priced:
    """Price the plan of one site.

    Raises:
        RequestError: the model cannot be traced, or does not allow the plan.
    """
    chain = chain_for(asked.recipe, asked.spec)
    _check_plan(asked, chain)
    cluster, plan = asked.site_cluster, asked.site_plan
    if plan.pp > 1:
        # A schedule has stages of its own number where the plan leaves that to it.
        grid = schedule_for(plan, plan.microbatches or 1).grid
        plan = replace(plan, chunks=grid.chunks)
    job = job_on(
        asked.recipe,
        chain,
        cluster,
        global_batch=asked.global_batch // asked.num_sites,
    )
    return Priced(
        parts=price_parts(job, plan),
        needed=_bytes(job, plan),
        weight_bytes=job.weight_bytes * job.chain.weights,
        tokens=job.chain.tokens,
    )


def _check_plan(asked: Asked, chain: ModelCosts) -> None:
    """Hold a plan to what only looking at the model tells; that of shipped models was asked before."""
    plan = asked.plan
    check_experts(plan, chain)
    facts = facts_for(asked.recipe, asked.spec)
    replace(plan, ep=1).check(facts)
    # Blocks are counted above; of a module without any, every layer can be a stage.
    num_stages = plan.num_stages if plan.pp > 1 else 1
    if facts.num_units is None and not facts.num_blocks and num_stages > len(chain.layers):
        raise RequestError(
            f"plan {str(plan)!r} wants {num_stages} stages, and {chain.name} can be cut into {len(chain.layers)}; "
            f"lower pp or chunks"
        )


def _bytes(job: Job, plan: Plan) -> StepBytes:
    """States of every pipeline rank, and what one microbatch leaves behind in every stage."""
    chain = job.chain
    samples = job.global_batch / ((plan.dp or 1) * (plan.microbatches or 1))
    kept = [rank_kept_bytes(layer, job, plan, plan.recompute) for layer in chain.distinct]
    stages = count_stages(chain, plan.pp * (plan.chunks or 1))
    return StepBytes(
        places=tuple(
            Held(
                weights=memory.weights,
                gradients=memory.gradients,
                optimizer=memory.optimizer,
                other=memory.working + memory.versions + memory.context_bytes,
            )
            for memory in price_memory(job, plan)
        ),
        activations=tuple(samples * sum(kept[layer] * count for layer, count in counted.items()) for counted in stages),
    )
