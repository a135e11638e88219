"""Settings of ``[paramserver]`` that do not go with the plan's update rule, or with each other; found before anything starts."""

from collections.abc import Iterator

from shoal.core.plan import Plan
from shoal.core.updates import UpdateRule
from shoal.paramserver.shares import portion_samples
from shoal.trainer.config import Recipe


def rule_problems(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What is wrong, each with its fix; the plan has parameter servers."""
    rule = UpdateRule.parse(plan.update or "bsp").resolve(plan.num_shares)
    config = recipe.paramserver
    yield from _local_problems(recipe, plan, rule)
    yield from _size_problems(recipe, plan, rule)
    if config.warm_start and rule.kind != "downpour":
        yield f"paramserver.warm_start {config.warm_start} is of downpour, and the rule is {rule}; leave it out"
    if config.local_lr and rule.kind != "downpour" and not config.local_steps:
        yield (
            f"paramserver.local_lr {_listed(config.local_lr)} is for steps that workers take by themselves, and under {rule} "
            f"without local_steps there are none; leave it out"
        )
    if rule.kind == "lbfgs":
        yield from _lbfgs_problems(recipe)
    else:
        yield from _cache_problems(recipe, plan, rule)


def _local_problems(recipe: Recipe, plan: Plan, rule: UpdateRule) -> Iterator[str]:
    config, workers = recipe.paramserver, plan.num_shares
    steps = config.local_steps
    if config.aggregate == "fednova" and not steps:
        yield "paramserver.aggregate fednova joins the local steps of workers, and local_steps is not set; set it, such as [1, 2]"
    if not steps:
        return
    if config.aggregate != "fednova":
        yield (
            f"paramserver.local_steps {_listed(steps)} need aggregate fednova, and it is {config.aggregate}: the worker with the "
            f"most steps would decide where training goes; set aggregate to fednova, or leave local_steps out"
        )
    if rule.kind in ("downpour", "lbfgs"):
        yield f"paramserver.local_steps {_listed(steps)} do not go with {rule.kind}, which has steps of its own; leave them out"
    if len(steps) > workers:
        yield f"paramserver.local_steps {_listed(steps)} name {len(steps)} workers, and the plan has {workers}"
    share = min(_portion_samples(recipe, plan))
    if max(steps) > share:
        yield (
            f"paramserver.local_steps has {max(steps)} steps on the {share} samples of a portion (global_batch "
            f"{recipe.train.global_batch} / workers {workers}); take {share} steps at most, or a larger global_batch"
        )


def _size_problems(recipe: Recipe, plan: Plan, rule: UpdateRule) -> Iterator[str]:
    sizes, batch = recipe.paramserver.batch_shares, recipe.train.global_batch
    if not sizes:
        return
    said = f"paramserver.batch_shares {_listed(sizes)}"
    if rule.kind == "lbfgs":
        yield f"{said} cut a step by worker, and under lbfgs small portions of a batch go to whoever is free; leave them out"
    if recipe.paramserver.aggregate == "adasum":
        yield (
            f"{said} make portions of unequal size, and aggregate adasum joins gradients by their directions, whatever they are "
            f"the mean of; leave one of them out"
        )
    if plan.ranks_per_replica > 1:
        yield (
            f"{said} are for workers of one process, and the plan has {plan.ranks_per_replica} ranks each; "
            f"leave them out, or leave tp, cp and pp out of the plan"
        )
    if recipe.train.micro_batch is not None:
        yield (
            f"{said} cut portions of unequal size into as many microbatches each, and train.micro_batch is "
            f"{recipe.train.micro_batch}; say microbatches in the plan instead"
        )
    if len(sizes) > plan.num_shares:
        yield f"{said} name {len(sizes)} workers, and the plan has {plan.num_shares}"
    smallest = min(_portion_samples(recipe, plan))
    if smallest < (plan.microbatches or 1):
        yield (
            f"{said} leave {smallest} of the {batch} samples of global_batch to a portion of {plan.microbatches or 1} "
            f"microbatches; make the sizes more alike, or global_batch larger"
        )


def _portion_samples(recipe: Recipe, plan: Plan) -> list[int]:
    """Samples of every portion of a whole step."""
    batch, sizes = recipe.train.global_batch, recipe.paramserver.portion_sizes(plan.num_shares)
    if sizes is None:
        return [batch // plan.num_shares]
    return portion_samples(batch, sizes)


def _cache_problems(recipe: Recipe, plan: Plan, rule: UpdateRule) -> Iterator[str]:
    rounds = recipe.paramserver.cache_staleness
    if rounds and plan.ps == 1:
        yield (
            f"paramserver.cache_staleness {rounds} lets what other servers than the first hold be older, and the plan has ps=1; "
            f"take ps=2 or more, or leave it out"
        )
    elif rounds and rule.staleness == 0:
        yield (
            f"paramserver.cache_staleness {rounds} does nothing under {rule}, which reads the weights of the step before; "
            f"use ssp:{rounds} or async, or leave it out"
        )


def _lbfgs_problems(recipe: Recipe) -> Iterator[str]:
    config = recipe.paramserver
    if recipe.train.precision in ("bfloat16", "float16"):
        yield (
            f"update=lbfgs compares losses that {recipe.train.precision} cannot tell apart; "
            f"set train.precision to float32 or float64"
        )
    if recipe.optim.weight_decay:
        yield (
            f"optim.weight_decay {recipe.optim.weight_decay:g} is of an optimizer, and update=lbfgs has none; "
            f"put the penalty into the loss"
        )
    if config.aggregate not in ("average", "fednova"):
        yield f"paramserver.aggregate {config.aggregate} does not go with lbfgs, whose gradient is the mean; use average"
    for name in ("delay_compensation", "drop_beyond", "staleness_aware", "duplicate_after", "cache_staleness"):
        if getattr(config, name):
            yield f"paramserver.{name} is about old gradients or weights, and under lbfgs there are none; leave it out"


def _listed(values: tuple[float, ...]) -> str:
    return str([*values])
