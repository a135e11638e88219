"""What a user asks to be proved, checked before any process starts: the plans, the arithmetic, the number of steps."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.global_batch import why_not_joined
from shoal.core.compressrule import CompressRule
from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan, all_plans
from shoal.core.syncrule import SyncRule
from shoal.core.updaterule import UpdateRule
from shoal.data.source import Splits
from shoal.engine.batches.schedule import all_batches
from shoal.engine.compression.settings import check_compression
from shoal.engine.config import TrainConfig
from shoal.engine.meancheck import joins_batch
from shoal.engine.parallelize import analyse
from shoal.engine.resolve import check_processes, check_samples, choose_plan, count_steps, resolve_plan
from shoal.engine.state import hash_weights
from shoal.models.config import OwnModelConfig
from shoal.models.embeddings import make_dense
from shoal.optim.adapt import scale_factor
from shoal.optim.config import OptimConfig, PrecisionName
from shoal.optim.torchclass import check_named
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.requirements import describe_facts
from shoal.paramserver.worker.flat import refuse_batch_norm
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe, RecipeLike, read_recipe
from shoal.trainer.request import refuse_settings
from shoal.verify.compare.tolerance import needs_float64
from shoal.verify.exclusive import has_clock, refuse_clock
from shoal.verify.mutants.mutant import Death
from shoal.verify.reference.case import Case, Tree


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is proved: a recipe, and the numbers that follow from its model and data."""

    recipe: Recipe
    total_steps: int
    facts: ModelFacts
    """What plans ask of the model."""
    num_samples: int
    has_batch_norm: bool
    model: nn.Module
    """As one process builds it; looked at, never trained."""
    data: Splits
    analysis: ModuleAnalysis
    joins_batch: bool = False
    """Its loss is over the global batch: model or loss call ``all_gather``."""

    def joins_replicas(self, plan: Plan) -> bool:
        """True when the replicas of a plan are one batch to this model, whose sums they split: batch norm, ``all_gather``."""
        is_synchronised = self.recipe.train.batch_norm == "sync" and self.has_batch_norm
        return (is_synchronised or self.joins_batch) and (plan.dp or 1) > 1


@dataclass(frozen=True, kw_only=True)
class ProofRequest:
    """One plan in one arithmetic, everything derived."""

    subject: Subject
    recipe: Recipe
    """The subject's, in this arithmetic and with the cut of this plan."""
    plan: Plan
    case: Case
    tree: Tree
    mutant: str | None = None
    """A bug to plant, by name."""
    deaths: Sequence[Death] = ()
    """Servers that are killed on the way."""
    started: float = field(default_factory=time.monotonic)


DEFAULT_PROCESSES = 4
_PRECISIONS: tuple[PrecisionName, ...] = ("float64", "float32", "bfloat16", "float16")
_PROVABLE_RULES = ("bsp", "ssp", "async", "half", "downpour")
DEFAULT_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One thing to prove."""

    plan: Plan
    precision: PrecisionName


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A plan that this recipe cannot run, or that nothing can be proved of."""

    plan: Plan
    precision: PrecisionName
    reason: str


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """A request that was checked."""

    subject: Subject
    proposals: tuple[Proposal, ...]
    refusals: tuple[Refusal, ...]
    model_hash: str
    """SHA-256 of the initial weights."""
    warnings: tuple[str, ...] = ()


def prepare_verify(
    given: RecipeLike,
    *,
    plans: Sequence[str] = (),
    takes_all: bool = False,
    num_processes: int | None = None,
    precision: str | None = None,
    overrides: Sequence[str] = (),
) -> VerifyRequest:
    """Check a request and derive what it left open.

    Args:
        given: the recipe.
        plans: what to prove; the recipe's own plan when there is none and ``takes_all`` is off.
        takes_all: every plan that ``check()`` allows.
        num_processes: processes of each plan; for ``takes_all`` left out, every number up to four.
        precision: one arithmetic for all; left out, the recipe's, and float64 too where sums are split.
        overrides: ``section.key=value`` for the recipe.

    Raises:
        RequestError: the recipe is wrong, or none of its plans can be proved; says what is wrong with each, and what to do.
    """
    recipe = read_recipe(given, overrides)
    if num_processes is not None:
        check_processes(num_processes)
    subject = build_subject(recipe)
    proposals: list[Proposal] = []
    refusals: list[Refusal] = []
    for plan in _every_plan(subject, num_processes) if takes_all else _named_plans(recipe, plans, num_processes):
        try:
            check_processes(plan.world_size)
            check_plan(subject, plan)
            names = choose_precisions(
                plan,
                precision,
                recipe.optim,
                trained=recipe.train.precision,
                joins_replicas=subject.joins_replicas(plan),
            )
            for name in names:
                train = recipe.train.model_copy(update={"precision": name})
                check_compression(recipe.model_copy(update={"train": train}).settings, plan)
        except RequestError as error:
            refusals.append(Refusal(plan=plan, precision=recipe.train.precision, reason=str(error)))
        else:
            proposals += [Proposal(plan=plan, precision=name) for name in names]
    if refusals and not proposals:
        raise RequestError("\n".join(dict.fromkeys(refusal.reason for refusal in refusals)))
    # Ranks are kept while the number of processes stays the same.
    proposals.sort(key=lambda proposal: proposal.plan.world_size)
    return VerifyRequest(
        subject=subject,
        proposals=tuple(proposals),
        refusals=tuple(refusals),
        model_hash=hash_weights(subject.model),
        warnings=tuple(_left_out(recipe, proposals, precision)),
    )


def _named_plans(recipe: Recipe, plans: Sequence[str], num_processes: int | None) -> list[Plan]:
    texts: list[str | None] = [*plans] or [None]
    return [choose_plan(recipe.plan, plan_text=text, num_processes=num_processes) for text in texts]


def build_subject(recipe: Recipe) -> Subject:
    """The model of a recipe, and the numbers that a proof needs to know of it.

    Raises:
        RequestError: its optimizer is a class of torch that cannot be used.
    """
    check_named(recipe.optim)
    model, loss, data = build_parts(recipe)
    make_dense(model)
    total = count_steps(recipe.train, num_samples=len(data.train), tokens_per_sample=data.spec.tokens_per_sample)
    analysis = analyse(model, data, recipe.parallel)
    facts = describe_facts(analysis, model)
    return Subject(
        recipe=recipe,
        total_steps=total,
        facts=facts,
        num_samples=len(data.train),
        has_batch_norm=any(isinstance(module, _BatchNorm) for module in model.modules()),
        model=model,
        data=data,
        analysis=analysis,
        joins_batch=(isinstance(recipe.model, OwnModelConfig) or recipe.model.loss is not None)
        and joins_batch(model, loss, data.train),
    )


LONGEST_PROOF = 64
"""Steps that a proof of islands or of compressed gradients takes at most."""
SHORTEST_PROOF = 10
"""Steps that it takes at least, where the run has as many."""
_COMPRESSED_STEPS = 3
"""Of which so many are compressed: what a replica remembers comes to light in the step after."""


def steps_to_prove(plan: Plan, train: TrainConfig) -> int:
    """Steps that a proof of this plan needs: with islands, two rounds of every part of the model and a step after them.

    Where rounds begin to be compressed later, they are counted from there. With ``train.batch_schedule``, two steps after its
    last change, or after the second decision of "noise".
    """
    if plan.islands == 1 and plan.compress is None:
        if train.batch_schedule is None:
            return 1
        return 2 + (2 * train.batch_every if train.batch_schedule == "noise" else train.batch_schedule[-1][0])
    return max(SHORTEST_PROOF, _last_step(plan))


def _last_step(plan: Plan) -> int:
    """The number of steps after which everything that the plan does has been seen."""
    start = 0 if plan.compress is None else CompressRule.parse(plan.compress).start
    if plan.islands == 1:
        return start + _COMPRESSED_STEPS
    rule = SyncRule.parse(plan.sync)
    return max(start, rule.start) + (3 if rule.kind == "stream" else 2) * rule.period + rule.delay + 1


def check_plan(subject: Subject, plan: Plan) -> None:
    """Refuse a plan that this recipe cannot run.

    Raises:
        RequestError: both numbers and the fix.
    """
    plan.check(subject.facts, world_size=plan.world_size)
    refuse_settings(subject.recipe, plan)
    _refuse_unprovable(subject, plan)
    resolved = resolve_plan(subject.recipe.train, plan).plan
    if subject.joins_batch and (reason := why_not_joined(resolved)) is not None:
        raise RequestError(reason)
    _refuse_centered(subject.recipe.optim, plan)
    check_samples(num_samples=subject.num_samples, replicas=plan.num_shares)


def _refuse_unprovable(subject: Subject, plan: Plan) -> None:
    """Refuse what trains but has no counterpart in one process."""
    if plan.ps:
        refuse_batch_norm(subject.model)
        found = list(_unprovable_servers(subject.recipe, plan))
        if found:
            raise RequestError("\n".join(f"plan {str(plan)!r}: {problem}" for problem in found))
        return
    if plan.with_islands.islands > 1:
        _refuse_unprovable_islands(subject, plan.with_islands)
    if plan.compress is not None:
        _refuse_unprovable_sums(subject, plan)
    if plan.with_islands.islands == 1:
        _refuse_unprovable_rates(subject, plan)
    is_delayed = plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous
    if is_delayed and subject.joins_replicas(plan):
        raise RequestError(
            f"plan {str(plan)!r}: with train.batch_norm sync the replicas of a microbatch run as one, and under "
            f"schedule={plan.schedule} one process cannot; prove it with train.batch_norm=local, or with dp=1"
        )


def _refuse_unprovable_sums(subject: Subject, plan: Plan) -> None:
    """Refuse compressed gradients that begin too late to be seen, or of replicas that have none of their own."""
    needed, there = _last_step(plan), min(LONGEST_PROOF, subject.total_steps)
    if plan.with_islands.islands == 1 and needed > there:
        codec = (plan.compress or "").partition("@")[0]
        raise RequestError(
            f"plan {str(plan)!r}: {_COMPRESSED_STEPS} compressed steps are done after {needed}, and a proof has {there} at most; "
            f"prove compress={codec}@1, or raise train.steps"
        )
    if subject.joins_replicas(plan):
        raise RequestError(
            f"plan {str(plan)!r}: with synchronised batch norm or a loss over the global batch the replicas run as one, and in "
            "one process none of them has a gradient of its own to compress; prove it with train.batch_norm=local, or without "
            "compress"
        )


def _refuse_unprovable_islands(subject: Subject, plan: Plan) -> None:
    """Refuse islands whose rounds are not a function of the steps, or too far apart to be seen in a proof."""
    rule, needed = SyncRule.parse(plan.sync), steps_to_prove(plan, subject.recipe.train)
    if has_clock(plan):
        refuse_clock(plan)
    if subject.recipe.replicas.interval == "adacomm":
        said = (
            "replicas.interval adacomm follows evaluations, and a proof makes none, so it would prove rounds that never come "
            "closer"
        )
        raise RequestError(f"plan {str(plan)!r}: {said}; prove it with --set replicas.interval=fixed")
    if needed > min(LONGEST_PROOF, subject.total_steps):
        raise RequestError(
            f"plan {str(plan)!r}: two rounds take {needed} steps, and a proof has {min(LONGEST_PROOF, subject.total_steps)} at "
            f"most; prove a shorter period, such as sync={rule.kind}:{4 if rule.kind != 'stream' else '4,2,1'}, or raise "
            "train.steps"
        )
    if subject.has_batch_norm and subject.recipe.train.batch_norm == "sync":
        said = "with train.batch_norm sync the replicas of an island run as one, which its proof does not"
        raise RequestError(f"plan {str(plan)!r}: {said}; prove it with train.batch_norm=local")


def _refuse_unprovable_rates(subject: Subject, plan: Plan) -> None:
    """Refuse rates and batches that adapt to what a proof does not see."""
    recipe = subject.recipe
    if plan.compress is not None:
        if recipe.optim.adapt != "none" or recipe.train.batch_schedule is not None:
            raise RequestError(
                f"plan {str(plan)!r}: the proof of compress={plan.compress} knows no optim.adapt and no train.batch_schedule; "
                "prove one of the two at a time"
            )
        return
    needed, most = steps_to_prove(plan, recipe.train), min(LONGEST_PROOF, subject.total_steps)
    if recipe.optim.adapt == "bold":
        said = (
            "optim.adapt bold follows evaluations, and a proof makes none, so it would prove a rate that never changes"
        )
        raise RequestError(f"{said}; prove the plan with --set optim.adapt=none")
    if recipe.optim.adapt in ("noise", "adascale") and (subject.joins_replicas(plan) or subject.joins_batch):
        raise RequestError(
            f"optim.adapt {recipe.optim.adapt} compares gradients of microbatches, and this model's replicas are one batch to "
            "it, so one process has none of a microbatch; prove it with train.batch_norm=local, or --set optim.adapt=none"
        )
    if needed > most:
        what = "train.batch_every" if recipe.train.batch_schedule == "noise" else "the steps of train.batch_schedule"
        raise RequestError(
            f"train.batch_schedule has changed the batch after {needed} steps at the earliest, and a proof has {most} at most; "
            f"prove it with smaller steps: lower {what} by --set, or raise train.steps"
        )


def fastest_rates(recipe: Recipe, steps: int) -> OptimConfig:
    """The optimizer's section with the highest rate that anything which adapts may make of it in so many steps."""
    optim, batches = recipe.optim, all_batches(recipe.train)
    factor = scale_factor(optim, max(batches)) if optim.scale != "none" else 1.0
    if optim.adapt == "adascale" and optim.scale_base is not None:
        factor = max(1.0, max(batches) / optim.scale_base)
    if optim.adapt == "hyper":
        factor *= min((1.0 + optim.adapt_step) ** steps, optim.adapt_bounds[1])
    return optim if factor == 1.0 else optim.model_copy(update={"lr": optim.lr * factor})


def _refuse_centered(optim: OptimConfig, plan: Plan) -> None:
    if (plan.tp > 1 or plan.cp > 1) and needs_float64(optim) and optim.args.get("centered", False):
        raise RequestError(
            f"plan {str(plan)!r}: {optim.name} with centered moves roundings so far that no bound tells them from a bug where "
            f"sums are split; prove it under dp, zero or pp, or this plan with --set optim.args.centered=false"
        )


def _unprovable_servers(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What parameter servers can do and one process has no rule for, each with its fix."""
    rule, config = UpdateRule.parse(plan.update or "bsp"), recipe.paramserver
    if rule.kind not in _PROVABLE_RULES:
        yield (
            f"update={plan.update} is not proved by verify, which proves {', '.join(_PROVABLE_RULES)}: it is no update of "
            f"an optimizer; its own test compares it with torch's"
        )
    if rule.kind == "downpour" and config.overlap:
        yield (
            "paramserver.overlap lets fetched weights come in at any step of a worker under downpour, which the servers' log "
            "does not have; use --set paramserver.overlap=false"
        )
    if config.aggregate != "average":
        yield (
            f"paramserver.aggregate {config.aggregate} is not proved by verify; use --set paramserver.aggregate=average"
        )
    if config.batch_shares:
        yield (
            f"paramserver.batch_shares {[*config.batch_shares]} cut a step otherwise than the one process that it is compared "
            f"with; use --set paramserver.batch_shares=[]"
        )
    if config.delay_compensation:
        yield (
            f"paramserver.delay_compensation {config.delay_compensation:g} is not proved by verify; "
            f"use --set paramserver.delay_compensation=0"
        )


def choose_precisions(
    plan: Plan,
    asked: str | None,
    optim: OptimConfig,
    *,
    trained: PrecisionName = "float32",
    joins_replicas: bool = False,
) -> tuple[PrecisionName, ...]:
    """What the recipe trains in, and float64 too where sums are split: there only float64 tells a rounding from a bug.

    Args:
        plan: what is proved.
        asked: one arithmetic alone; None leaves the choice.
        optim: how gradients become weights.
        trained: the recipe's own arithmetic.
        joins_replicas: batch norm is synchronised, which splits sums too.

    Raises:
        RequestError: there is no such arithmetic, or nothing can be proved in it.
    """
    is_split = plan.tp > 1 or plan.cp > 1 or joins_replicas
    if asked is not None and asked not in _PRECISIONS:
        raise RequestError(f"--dtype {asked!r} is none of {', '.join(_PRECISIONS)}")
    if is_split and needs_float64(optim):
        if asked not in (None, "float64"):
            raise RequestError(
                f"plan {str(plan)!r}: --dtype {asked} proves nothing with {optim.name}, whose first steps are as long for a "
                f"rounding as for a gradient; use --dtype float64"
            )
        return ("float64",)
    names = [name for name in _PRECISIONS if name == (asked or trained)]
    _refuse_scaled_loss(plan, names[0], "train.precision" if asked is None else "--dtype")
    if asked is None and is_split and trained != "float64":
        names.append("float64")
    return tuple(names)


def _refuse_scaled_loss(plan: Plan, precision: PrecisionName, said: str) -> None:
    if precision != "float16":
        return
    if plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        raise RequestError(f"{said} float16 scales its loss, which schedule={plan.schedule} cannot; use bfloat16")
    if plan.ps:
        raise RequestError(
            f"{said} float16 scales its loss, which workers of ps={plan.ps} at different steps cannot; use bfloat16"
        )


def _left_out(recipe: Recipe, proposals: Sequence[Proposal], asked: str | None) -> Iterator[str]:
    """Plans that are not proved in what the recipe trains in, where nobody asked for another arithmetic."""
    trained = recipe.train.precision
    tried = {str(proposal.plan) for proposal in proposals if proposal.precision == trained}
    for plan in dict.fromkeys(str(proposal.plan) for proposal in proposals):
        if asked is None and plan not in tried:
            yield (
                f"plan {plan!r} is not proved in {trained}: the first steps of {recipe.optim.name} are as long for a rounding as "
                f"for a gradient, and only float64 tells the two apart"
            )


def server_plans(num_processes: int) -> list[Plan]:
    """Plans with parameter servers over so many processes: every rule on one server, backups and workers that are groups once
    there are enough."""
    workers = num_processes - 1
    if workers < 1:
        return []
    several = ["bsp", "ssp:1", "async", f"half:{max(2, workers - 1)},0.25", "downpour:2,2"]
    rules = ["bsp", "async"] if workers == 1 else several
    found = [Plan(ps=1, workers=workers, update=rule) for rule in rules]
    if num_processes >= 4:
        found.append(Plan(ps=2, workers=num_processes - 2, update="bsp", backup=1))
    if workers % 2 == 0:
        found += [
            Plan(ps=1, workers=workers // 2, update="bsp", tp=2),
            Plan(ps=1, workers=workers // 2, update="bsp", pp=2),
        ]
    return found


_COMPRESSED = {
    2: ("dp=2 compress=int8", "dp=2 zero=1 compress=int4", "dp=2 compress=topk:0.01", "dp=2 compress=powersgd:2"),
    3: ("dp=3 compress=int4",),
    4: ("dp=4 compress=sign", "dp=2 pp=2 compress=int8"),
}
"""By processes, a plan for each way in which gradients go compressed: what a codec does to a tensor depends on no plan."""


def compressed_plans(subject: Subject, num_processes: int) -> list[Plan]:
    """Plans over so many processes whose gradients go compressed, a few for all, where the recipe can run and prove them."""
    found = []
    for text in _COMPRESSED.get(num_processes, ()):
        plan = Plan.parse(text)
        try:
            check_plan(subject, plan)
        except RequestError:
            continue  # They stand for many, and that these do not fit says nothing of the recipe.
        found.append(plan)
    return found


def _every_plan(subject: Subject, num_processes: int | None) -> list[Plan]:
    recipe = subject.recipe
    sizes = [num_processes] if num_processes is not None else list(range(1, DEFAULT_PROCESSES + 1))
    written = Plan.parse(recipe.plan) if recipe.plan.strip() != "auto" else Plan()
    found = []
    for size in sizes:
        with_servers = [plan for plan in server_plans(size) if not plan.problems(subject.facts)]
        found += [
            replace(allowed, microbatches=written.microbatches)
            for allowed in [*all_plans(size, subject.facts), *with_servers, *compressed_plans(subject, size)]
        ]
    if not found:
        raise RequestError(f"no plan over {' or '.join(map(str, sizes))} processes fits this recipe")
    return found
