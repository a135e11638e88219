"""The ``[paramserver]`` section of a recipe: how old gradients are treated, what workers cache, and who counts as dead."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shoal.core.config import Config
from shoal.core.plan import Plan
from shoal.core.updaterule import UpdateRule
from shoal.paramserver.consistency import Aggregate


class ParamServerConfig(Config):
    """Parameter servers, beyond what the plan says."""

    aggregate: Aggregate = "average"
    """How pushes become one update: mean by samples, sum of their own means, Adasum, or fednova (with local_steps)."""
    staleness_aware: bool = False
    """Divide a gradient that is tau updates old by max(1, tau); under async and downpour."""
    drop_beyond: int | None = Field(default=None, ge=0)
    """Oldest gradient that still counts, in updates; an older one is dropped and its work unit is computed again."""
    delay_compensation: float = Field(default=0.0, ge=0)
    """Lambda of g + lambda g g (w_now - w_read), which corrects an old gradient to first order; 0 is off."""
    duplicate_after: float | None = Field(default=None, gt=1)
    """Give a work unit that takes longer than so many mean step times to an idle worker as well; the first result counts."""
    overlap: bool = False
    """Push while the next work unit is computed, and pull under async, ssp and downpour; its weights lack what is under way."""
    local_lr: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Rate of a worker's own steps (downpour, local_steps), by worker, the last for all further ones; else the recipe's."""
    local_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps that a worker takes by itself in a work unit, by worker, the last for all further ones; with aggregate fednova."""
    batch_shares: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Size of a worker's work unit beside the others', by worker, the last for all further ones; left out, all are alike.

    [3, 1] gives worker 0 three quarters of a step's samples. A work unit that its worker does not take goes to whoever is free.
    """
    warm_start: int = Field(default=0, ge=0)
    """Work units that the first worker does alone before the others begin, under downpour."""
    lbfgs_lr: float = Field(default=1.0, gt=0)
    """Step that the line search of lbfgs tries first, in lengths of its direction."""
    lbfgs_history: int = Field(default=10, ge=1)
    """Steps that lbfgs remembers; servers hold two vectors of the weights' size for each and up to ten more."""
    lbfgs_search: Literal["strong_wolfe", "fixed"] = "strong_wolfe"
    """How lbfgs finds the length of a step; fixed takes lbfgs_lr as it is."""
    lbfgs_tolerance: float = Field(default=1e-7, ge=0)
    """Largest element of a gradient at which lbfgs has arrived and moves no more."""
    hot: tuple[str, ...] | Literal["measured"] = ()
    """Parameters kept on the first server and read fresh, by pattern; or "measured".

    By pattern, all others are cached where cache_staleness allows. Measured, nothing is placed: tensors whose first gradients
    touch few rows send only these, and what is cached are servers that hold hardly anything else.
    """
    cache_staleness: int = Field(default=0, ge=0)
    """Cached parameters may be so many updates behind the first server's at a worker before they are pulled again; see hot."""
    centers: int = Field(default=2, ge=1)
    """Candidates for the center: one leads, the others wait."""
    lease_seconds: float = Field(default=2.0, gt=0.2)
    """How long a center may be silent before another is elected; a dead one is replaced at once."""
    dead_seconds: float = Field(default=5.0, gt=0.5)
    """How long a server or worker may be silent before it counts as dead; one that died on this machine counts at once."""
    deadline: float = Field(default=60.0, gt=0)
    """The longest wait for a server, backup or center, beside the time that payloads have, before a process names it."""
    hang_after: float = Field(default=50.0, ge=0)
    """A worker that is in one work unit for so many of its usual ones, and hang_seconds, ends and is started again; 0: never.

    Usual is the median of its last twenty; no work unit is taken to hang that lasts less than twice the longest of them.
    """
    hang_seconds: float = Field(default=60.0, gt=0)
    """No work unit is taken to hang before it has lasted so long; see hang_after."""
    max_respawns: int = Field(default=200, ge=0)
    """How many dead servers, workers and centers are started again in one run."""

    @field_validator("hot", mode="before")
    @classmethod
    def _one_pattern(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value != "measured" else value

    @field_validator("local_lr", "local_steps", "batch_shares", mode="before")
    @classmethod
    def _one_for_all(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    def own_steps(self, index: int) -> int:
        """The local steps of a worker."""
        return self.local_steps[min(index, len(self.local_steps) - 1)] if self.local_steps else 1

    def unit_sizes(self, workers: int) -> tuple[float, ...] | None:
        """How large the work units of a step are beside each other; None: all alike."""
        if not self.batch_shares:
            return None
        return tuple(self.batch_shares[min(index, len(self.batch_shares) - 1)] for index in range(workers))

    def own_rate(self, index: int) -> float | None:
        """The rate of a worker's own steps; None: the recipe's."""
        return self.local_lr[min(index, len(self.local_lr) - 1)] if self.local_lr else None


def group_plan(plan: Plan) -> Plan:
    """What the ranks of one worker do together: the plan without its servers, on one replica; only pushes are compressed."""
    return replace(plan, dp=1, ps=0, workers=None, update=None, backup=0, compress=None)


def pulls_ahead(config: ParamServerConfig, rule: UpdateRule) -> bool:
    """Whether this way of working is asked for and has something to give.

    Not where a step reads the step before (``bsp``, ``ssp:0``), nor under ``half``, where a worker waits for its own update: what
    was pulled before is never enough there. Nor with local steps, which begin and end at the weights that were pulled.
    """
    return config.overlap and not config.local_steps and rule.kind in ("async", "ssp") and rule.staleness != 0


def span_of(num_samples: int, share: int, sizes: Sequence[float]) -> tuple[int, int]:
    """Where a share begins and ends among the samples of a step, when shares are of these sizes beside each other."""
    total = math.fsum(sizes)
    start, stop = (round(num_samples * math.fsum(sizes[:end]) / total) for end in (share, share + 1))
    return start, stop


def unit_samples(global_batch: int, sizes: Sequence[float]) -> list[int]:
    """Samples of every work unit of a whole step, of work units of these sizes beside each other."""
    ends = [span_of(global_batch, share, sizes) for share in range(len(sizes))]
    return [stop - start for start, stop in ends]


def rule_problems(
    config: ParamServerConfig,
    plan: Plan,
    *,
    global_batch: int,
    micro_batch: int | None,
    precision: str,
    weight_decay: float,
) -> Iterator[str]:
    """Settings that do not go with the plan's update rule, or with each other, each with its fix.

    Args:
        config: the section.
        plan: has parameter servers.
        global_batch: ``train.global_batch``.
        micro_batch: ``train.micro_batch``.
        precision: ``train.precision``.
        weight_decay: ``optim.weight_decay``.
    """
    rule = UpdateRule.parse(plan.update or "bsp").resolve(plan.num_shares)
    yield from _local_problems(config, plan, rule, global_batch)
    yield from _size_problems(config, plan, rule, global_batch, micro_batch)
    if config.warm_start and rule.kind != "downpour":
        yield f"paramserver.warm_start {config.warm_start} is of downpour, and the rule is {rule}; leave it out"
    if config.local_lr and rule.kind != "downpour" and not config.local_steps:
        yield (
            f"paramserver.local_lr {_listed(config.local_lr)} is for steps that workers take by themselves, and under {rule} "
            f"without local_steps there are none; leave it out"
        )
    if plan.compress is not None and config.hot == "measured":
        yield (
            f"paramserver.hot measured counts the rows that gradients touch, and compress={plan.compress} sends all of them; "
            "leave one of the two out"
        )
    if rule.kind == "lbfgs":
        yield from _lbfgs_problems(config, precision, weight_decay)
    else:
        yield from _cache_problems(config, plan, rule)


def _local_problems(config: ParamServerConfig, plan: Plan, rule: UpdateRule, global_batch: int) -> Iterator[str]:
    workers, steps = plan.num_shares, config.local_steps
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
    share = min(_samples_of_units(config, plan, global_batch))
    if max(steps) > share:
        yield (
            f"paramserver.local_steps has {max(steps)} steps on the {share} samples of a work unit (global_batch "
            f"{global_batch} / workers {workers}); take {share} steps at most, or a larger global_batch"
        )


def _size_problems(
    config: ParamServerConfig, plan: Plan, rule: UpdateRule, global_batch: int, micro_batch: int | None
) -> Iterator[str]:
    sizes = config.batch_shares
    if not sizes:
        return
    said = f"paramserver.batch_shares {_listed(sizes)}"
    if rule.kind == "lbfgs":
        yield f"{said} cut a step by worker, and under lbfgs small work units of a batch go to whoever is free; leave them out"
    if config.aggregate == "adasum":
        yield (
            f"{said} make work units of unequal size, and aggregate adasum joins gradients by their directions, whatever they "
            f"are the mean of; leave one of them out"
        )
    if plan.ranks_per_replica > 1:
        yield (
            f"{said} are for workers of one process, and the plan has {plan.ranks_per_replica} ranks each; "
            f"leave them out, or leave tp, cp and pp out of the plan"
        )
    if micro_batch is not None:
        yield (
            f"{said} cut work units of unequal size into as many microbatches each, and train.micro_batch is "
            f"{micro_batch}; say microbatches in the plan instead"
        )
    if len(sizes) > plan.num_shares:
        yield f"{said} name {len(sizes)} workers, and the plan has {plan.num_shares}"
    smallest = min(_samples_of_units(config, plan, global_batch))
    if smallest < (plan.microbatches or 1):
        yield (
            f"{said} leave {smallest} of the {global_batch} samples of global_batch to a work unit of {plan.microbatches or 1} "
            f"microbatches; make the sizes more alike, or global_batch larger"
        )


def _samples_of_units(config: ParamServerConfig, plan: Plan, global_batch: int) -> list[int]:
    """Samples of every work unit of a whole step."""
    sizes = config.unit_sizes(plan.num_shares)
    return [global_batch // plan.num_shares] if sizes is None else unit_samples(global_batch, sizes)


def _cache_problems(config: ParamServerConfig, plan: Plan, rule: UpdateRule) -> Iterator[str]:
    updates = config.cache_staleness
    if updates and plan.ps == 1:
        yield (
            f"paramserver.cache_staleness {updates} lets what other servers than the first hold be older, and the plan has ps=1; "
            f"take ps=2 or more, or leave it out"
        )
    elif updates and rule.staleness == 0:
        yield (
            f"paramserver.cache_staleness {updates} does nothing under {rule}, which reads the weights of the step before; "
            f"use ssp:{updates} or async, or leave it out"
        )


def _lbfgs_problems(config: ParamServerConfig, precision: str, weight_decay: float) -> Iterator[str]:
    if precision in ("bfloat16", "float16"):
        yield (
            f"update=lbfgs compares losses that {precision} cannot tell apart; "
            f"set train.precision to float32 or float64"
        )
    if weight_decay:
        yield (
            f"optim.weight_decay {weight_decay:g} is of an optimizer, and update=lbfgs has none; "
            f"put the penalty into the loss"
        )
    if config.aggregate not in ("average", "fednova"):
        yield f"paramserver.aggregate {config.aggregate} does not go with lbfgs, whose gradient is the mean; use average"
    for name in ("delay_compensation", "drop_beyond", "staleness_aware", "duplicate_after", "cache_staleness"):
        if getattr(config, name):
            yield f"paramserver.{name} is about old gradients or weights, and under lbfgs there are none; leave it out"


def _listed(values: tuple[float, ...]) -> str:
    return str([*values])
