"""From a recipe and a cluster to the best plans: the front door of ``shoal plan``."""

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts
from shoal.core.pipelines import DEFAULT_SCHEDULE, schedule_facts
from shoal.core.plan import Plan
from shoal.core.units import divisors
from shoal.costs.layers import ModelCosts
from shoal.data.check import check_data
from shoal.data.spec import DataSpec
from shoal.models.check import check_model
from shoal.models.config import OwnModelConfig
from shoal.optim.build import num_state_bytes
from shoal.planner.hardware.clusters import read_cluster
from shoal.planner.hardware.devices import EXECUTED_PRECISIONS, Cluster, check_precisions, faster_precisions
from shoal.planner.hardware.software import find_software, find_stack
from shoal.planner.pricing.job import Job, check_batch, weight_bytes_of
from shoal.planner.search.candidates import Limits
from shoal.planner.search.estimate import Estimate, agree_estimate, estimate_by_schedule
from shoal.planner.search.explain import explain, refuse_small, why_not
from shoal.planner.search.per_layer import Choices, choose_splits, is_uneven
from shoal.planner.search.search import Found, merge, search
from shoal.trainer.config import Recipe, RecipeLike, read_recipe
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import OwnParts
from shoal.tuning.agreement import agreement_of
from shoal.tuning.options import check_options
from shoal.tuning.planned_model import check_experts, costs_for, facts_for
from shoal.tuning.ways_to_agree import FEW_DEVICES, Way, other_ways

_MANY = 1_000_000
_MOST_SPLIT = 256
"""Devices up to which a split of each layer's own is looked for: beyond them there are too many splits for a few seconds."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user asked for, as given."""

    recipe: RecipeLike
    cluster: str
    global_batch: int | None = None
    overrides: tuple[str, ...] = ()
    top: int = 5
    why_not: str | None = None
    precisions: tuple[str, ...] = ()
    """Compute types to rank together; those of ``[planner]``, else the recipe's own, when left out."""
    allow: tuple[str, ...] = ()
    """What else may be suggested, of ``options.ALLOWED``."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best plans, and what there is to say about them: ``found.ranked`` has them, the best first, with memory and time."""

    request: PlanRequest
    """What was asked."""
    job: Job
    """The model, the cluster and the batch that were priced."""
    found: Found
    """The plans, the best first in ``found.ranked``; the fastest that does not fit; how many were priced."""
    reasons: tuple[str, ...]
    """Why the best plan is the best."""
    warnings: tuple[str, ...]
    """What could not be asked of the model, and why there is no command that runs it."""
    why_not: tuple[str, ...]
    """What is against the plan that was asked about."""
    asked: Estimate | None
    """The plan that was asked about."""
    choices: Choices | None
    """The best split of every layer by itself, where layers are not alike."""
    is_shape: bool = False
    """A shape was planned for, in place of the recipe's module."""
    others: tuple[Estimate, ...] = ()
    """The best in each faster precision, where the user left the precision to the recipe."""
    ways: tuple[Way, ...] = ()
    """Policies and codecs by which replicas could agree instead: none of them equals one process."""

    @property
    def best(self) -> Plan:
        """The best plan."""
        return self.found.ranked[0].plan

    def command(self, estimate: Estimate) -> str | None:
        """The command that trains by a plan; None where it does not fit, Shoal does not execute it, something else was planned,
        or the recipe has no file."""
        request, is_ours = self.request, self.job.stack.software.name == "shoal"
        if not estimate.fits or estimate.not_executed or self.is_shape or not is_ours:
            return None
        if not isinstance(request.recipe, str | PathLike):
            return None
        changes = [change for change in request.overrides if not change.startswith("planner.")]
        if request.global_batch is not None:
            changes.append(f"train.global_batch={request.global_batch}")
        if estimate.precision != self.job.precision:
            changes.append(f"train.precision={estimate.precision}")
        words = ["shoal", "train", str(request.recipe), "--plan", str(estimate.plan)]
        return shlex.join([*words, *(word for change in changes for word in ("--set", change))])

    def as_values(self) -> dict[str, Any]:
        """What ``shoal plan --json`` writes."""
        job, found, choices = self.job, self.found, self.choices

        def values(one: Estimate | None) -> dict[str, Any] | None:
            if one is None:
                return None
            changes = one.precision != job.precision
            return {**one.as_dict(), "changes_numerics": changes, "command": self.command(one)}

        per_layer = None
        if choices is not None:
            per_layer = {
                "seconds": choices.seconds,
                "uniform_seconds": choices.uniform_seconds,
                "uniform": str(choices.uniform),
                "memory_bytes": choices.num_bytes,
                "splits": [str(split) for split in choices.splits],
            }
        return {
            "model": job.chain.name,
            "parameters": job.chain.weights,
            "cluster": self.request.cluster,
            "devices": job.cluster.num_devices,
            "global_batch": job.global_batch,
            "precision": job.precision,
            "in_range": job.stack.is_fitted,
            "plans": [values(one) for one in found.ranked],
            "runnable": values(found.runnable),
            "faster_precisions": [values(one) for one in self.others],
            "other_ways": [{**way.as_dict(), "command": self.command(way.found)} for way in self.ways],
            "refused": values(found.refused),
            "why": list(self.reasons),
            "remarks": list(self.warnings),
            "why_not": list(self.why_not),
            "asked": values(self.asked),
            "num_plans": found.num_plans,
            "search_s": found.seconds,
            "per_layer": per_layer,
        }


def plan(
    recipe: RecipeLike,
    cluster: str,
    *,
    global_batch: int | None = None,
    top: int = 5,
    why_not: str | None = None,
    precisions: Sequence[str] = (),
    overrides: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> Answer:
    """Rank the plans for a recipe on a cluster that need not be here, as ``shoal plan`` does.

    Args:
        recipe: the path of a recipe, its tables as a dict, or a ``Recipe``.
        cluster: a device, nodes and devices of each, such as ``h100:4x8``.
        global_batch: samples of a step; the recipe's when left out.
        top: how many plans to return.
        why_not: a plan to compare with the best.
        precisions: compute types to rank together; the recipe's own when left out.
        overrides: ``section.key=value`` for the recipe, as ``--set`` has them.
        allow: ``lossy`` ranks all policies and codecs by which replicas could agree in place of whole sums at every step.

    Returns:
        The answer: ``answer.best`` is the best plan, ``answer.as_values()`` what ``--json`` writes.

    Raises:
        RequestError: an unknown device or precision, a model that cannot be traced, a cluster that is too small.
    """
    request = PlanRequest(
        recipe=recipe,
        cluster=cluster,
        global_batch=global_batch,
        overrides=tuple(overrides),
        top=top,
        why_not=why_not,
        precisions=tuple(precisions),
        allow=tuple(allow),
    )
    return plan_for(request, own=OwnPartsHere())


def plan_for(request: PlanRequest, *, own: OwnParts) -> Answer:
    """Search plans for a request.

    Args:
        request: what the user asked for.
        own: measures the user's own data where the recipe names it.

    Raises:
        RequestError: an unknown device or precision, a model that cannot be traced, a cluster that is too small; each with its
            fix.
    """
    check_options(top=request.top, allow=request.allow)
    recipe = read_recipe(request.recipe, request.overrides)
    job, facts = build_job(recipe, request.cluster, global_batch=request.global_batch, own=own)
    limits = Limits(facts=facts)
    wanted = request.precisions or tuple(recipe.planner.precisions)
    device, software = job.cluster.device, job.stack.software
    precisions = check_precisions(wanted, device, software) or (job.precision,)
    jobs = [_job_in(recipe, job, precision, own) for precision in precisions]
    found = merge([search(each, limits, top=request.top) for each in jobs], top=request.top)
    if not found.ranked:
        # What needs least may be of any of them, and another one's weights and peak would be said to be its own.
        nearest = next((each for each in jobs if found.least and each.precision == found.least.precision), jobs[0])
        raise refuse_small(nearest, found, limits)
    faster = () if wanted else faster_precisions(job.precision, device, software)
    others = [
        one
        for precision in faster
        for one in search(_job_in(recipe, job, precision, own), limits, top=1).ranked
        if one.seconds < found.ranked[0].seconds
    ]
    asked: Estimate | None = None
    because: list[str] = []
    if request.why_not is not None:
        asked, because = _ask(recipe, jobs[0], facts, request.why_not, found.ranked[0])
    return Answer(
        request=request,
        job=job,
        found=found,
        reasons=tuple(explain(found.ranked)),
        warnings=(*job.cluster.warnings, *_warnings(recipe, [*found.ranked, *others])),
        why_not=tuple(because),
        asked=asked,
        choices=choose_splits(job) if is_uneven(job.chain) and job.cluster.num_devices <= _MOST_SPLIT else None,
        is_shape=recipe.planner.shape is not None,
        others=tuple(others),
        ways=_ways(recipe, job, limits, found.ranked[0], request),
    )


def _ways(recipe: Recipe, job: Job, limits: Limits, best: Estimate, request: PlanRequest) -> tuple[Way, ...]:
    """Other ways to agree: those that are much faster, or all where the user asks; other software has its own."""
    is_asked = "lossy" in request.allow
    if job.stack.software.name != "shoal" or not (is_asked or job.cluster.num_devices <= FEW_DEVICES):
        return ()
    return other_ways(recipe, job, limits, best, top=request.top, every=is_asked)


def _warnings(recipe: Recipe, shown: Sequence[Estimate]) -> Iterator[str]:
    if recipe.planner.shape is not None:
        yield (
            "no command runs these: they are for [planner.shape], and `shoal train` trains [model]; leave [planner.shape] out to "
            "plan for that"
        )
    elif recipe.planner.software != "shoal":
        yield (
            f"no command runs these: they are priced as {recipe.planner.software} runs them; leave planner.software out to plan "
            f"for `shoal train`"
        )
    is_own = recipe.planner.shape is None and isinstance(recipe.model, OwnModelConfig)
    if is_own and any(one.plan.sp or one.plan.cp > 1 for one in shown):
        yield (
            "sp and cp need blocks that mix positions inside attention alone, which only running the module can tell: "
            "`shoal train RECIPE --plan PLAN --dry-run` does"
        )


def _job_in(recipe: Recipe, job: Job, precision: str, own: OwnParts) -> Job:
    """The same job in another precision."""
    if precision == job.precision:
        return job
    # Products in fewer bits than 16 are surrounded by what is computed in 16.
    traced = precision if precision in EXECUTED_PRECISIONS else "bfloat16"
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": traced})})
    chain, _ = _model(recipe, own)
    return replace(job_on(recipe, chain, job.cluster, global_batch=job.global_batch), precision=precision)


def build_job(
    recipe: Recipe, cluster: str, *, global_batch: int | None = None, own: OwnParts
) -> tuple[Job, ModelFacts]:
    """The job of a recipe on a cluster, and what plans must know of its model.

    Raises:
        RequestError: the cluster, the software or the model cannot be understood.
    """
    where = read_cluster(cluster, recipe.planner.devices)
    batch = recipe.train.global_batch if global_batch is None else global_batch
    check_batch(batch)
    chain, facts = _model(recipe, own)
    return job_on(recipe, chain, where, global_batch=batch), facts


def job_on(recipe: Recipe, chain: ModelCosts, where: Cluster, *, global_batch: int) -> Job:
    """A chain trained as a recipe says, on a cluster.

    Raises:
        RequestError: the recipe names a software that is not known.
    """
    software, precision = find_software(recipe.planner.software), recipe.train.precision
    stack = find_stack(software, where.device.name)
    if where.reached is not None:
        # What was measured is what is reached, whatever other devices reach of their data sheets.
        stack = replace(stack, constants=where.reached, is_fitted=False, fitted_on=where.device.source, covered=None)
    weight_bytes = weight_bytes_of(stack.software, precision)
    # Of a tensor large enough that the few bytes for every tensor do not count; other software is taken to train with Adam.
    state_bytes = (
        num_state_bytes(recipe.optim, [_MANY], int(weight_bytes)) / _MANY if software.name == "shoal" else None
    )
    return Job(
        chain=chain,
        cluster=where,
        stack=stack,
        global_batch=global_batch,
        precision=precision,
        weight_bytes=weight_bytes,
        state_bytes=state_bytes,
    )


def _model(recipe: Recipe, own: OwnParts) -> tuple[ModelCosts, ModelFacts]:
    # Nothing is asked of the data where a shape stands in the module's place: they may lie where the cluster is.
    spec = None if recipe.planner.shape is not None else _spec(recipe, own)
    return costs_for(recipe, spec), facts_for(recipe, spec)


def _spec(recipe: Recipe, own: OwnParts) -> DataSpec:
    data = check_data(recipe.data)
    if data.spec is None:
        data = own.measure_data(recipe)
    assert data.spec is not None, "data that was measured has a spec"
    check_model(recipe.model, data.spec)
    return data.spec


def _ask(recipe: Recipe, job: Job, facts: ModelFacts, text: str, best: Estimate) -> tuple[Estimate | None, list[str]]:
    """The estimate of a plan that somebody asks about; what it leaves open is taken from the best plan."""
    plan = Plan.parse(text)
    if plan.ps:
        raise RequestError(f"--why-not {text!r}: parameter servers (ps={plan.ps}) are not priced; give a plan with dp")
    devices = job.cluster.num_devices
    broken = replace(plan, ep=1).problems()
    if broken:
        fixes = [*broken, *_instead(job, facts, plan)]
        raise RequestError(f"--why-not {text!r} is no plan: {'; '.join(fixes)}")
    if plan.dp is None:
        inside = plan.ranks_per_replica * plan.islands
        if devices % inside:
            (fix,) = _instead(job, facts, plan) or [f"choose tp, cp and pp whose product divides {devices}"]
            raise RequestError(f"--why-not {text!r}: {inside} ranks a replica do not divide {devices} devices; {fix}")
        plan = replace(plan, dp=devices // inside)
    plan = plan.with_islands
    wanted = plan
    if plan.world_size != devices:
        raise RequestError(
            f"--why-not {text!r} is for {plan.world_size} devices, and the cluster has {devices}; leave dp out"
        )
    if job.global_batch % plan.num_shares:
        enough = job.global_batch + -job.global_batch % plan.num_shares
        fixes = [f"give --global-batch {enough}", *_instead(job, facts, plan)]
        replicas = f"dp={plan.dp}" if plan.islands == 1 else f"islands={plan.islands} x dp={plan.dp}"
        raise RequestError(
            f"--why-not {text!r}: {replicas} does not divide the global batch of {job.global_batch}; {', or '.join(fixes)}"
        )
    if plan.microbatches is None:
        samples = max(1, job.global_batch // ((best.plan.dp or 1) * (best.plan.microbatches or 1)))
        per_replica = job.global_batch // plan.num_shares
        while per_replica % samples:
            samples -= 1
        plan = replace(plan, microbatches=max(1, per_replica // samples))
    if plan.pp > 1:
        chunks = plan.chunks or schedule_facts(plan.schedule).chunks
        plan = replace(plan, schedule=plan.schedule or DEFAULT_SCHEDULE, chunks=chunks if chunks > 1 else None)
    check_experts(plan, job.chain)
    problems = replace(plan, ep=1).problems(facts)
    if problems:
        return None, [*(f"{plan}: {problem}" for problem in problems), *_instead(job, facts, wanted)]
    found = estimate_by_schedule(job, replace(plan, sync="allreduce", compress=None))
    agreement = agreement_of(
        job,
        plan,
        compression=recipe.compression,
        sparse_bits=recipe.replicas.sparse_bits,
        seed=recipe.train.seed,
        step_seconds=found.seconds,
    )
    if agreement is None:
        return found, why_not(found, best)
    found = agree_estimate(job, found, plan, agreement)
    return found, [*why_not(found, best), f"{plan} does not equal one process: the loss changes with it"]


def _instead(job: Job, facts: ModelFacts, asked: Plan) -> list[str]:
    """What to ask about in place of a plan that cannot be: the nearest with one other degree that has these devices and batch.

    ``nearest_plan`` knows no batch, and dp, which follows from the other degrees here, would be one more of its changes.
    """
    devices = job.cluster.num_devices
    found: list[tuple[int, int, Plan]] = []
    for axis, degree in itertools.product(("tp", "pp", "cp"), divisors(devices)):
        degrees = {"tp": asked.tp, "pp": asked.pp, "cp": asked.cp, axis: degree}
        plan = replace(asked, ep=1, dp=None, tp=degrees["tp"], pp=degrees["pp"], cp=degrees["cp"])
        inside = plan.ranks_per_replica * plan.islands
        dp, rest = divmod(devices, inside) if inside else (1, 1)
        plan = replace(plan, dp=dp)
        fits = rest == 0 and job.global_batch % (plan.num_shares * (plan.microbatches or 1)) == 0
        if fits and not plan.problems(facts):
            found.append((abs(degree - getattr(asked, axis)), len(found), plan))
    return [f"the nearest plan that works on {devices} devices is {str(min(found)[-1])!r}"] if found else []
