"""The front door of training: everything that can be known to be wrong is found here, before any process starts.

No torch: a misspelt key is answered in a fraction of a second. Only a recipe that names the user's own functions, or a class of
torch, imports them, because that is the only way to know that they can be imported.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from shoal.checkpoint.files import step_name
from shoal.checkpoint.places.address import check_address
from shoal.checkpoint.retention import refuse_only_aside
from shoal.checkpoint.whole import newest_whole
from shoal.compression.config import has_residual, idle_settings
from shoal.core.codecrules import costly_ways
from shoal.core.compressrule import CompressRule
from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.core.syncrule import SyncRule
from shoal.core.updaterule import UpdateRule
from shoal.data.check import DataSummary, check_data, check_room, order_problems
from shoal.data.config import OwnDataConfig
from shoal.data.spec import DataSpec
from shoal.elastic.refusals import check_group
from shoal.engine.callback_config import EARLY_STOP, OwnCallbackConfig, check_followed, is_own
from shoal.engine.callbacks.adapt_rules import adapt_problems
from shoal.engine.compression.settings import check_compression
from shoal.engine.resolve import (
    ResolvedPlan,
    RunSetup,
    asks_the_model,
    check_settings,
    choose_plan,
    count_updates,
    resolve_plan,
    resolve_run,
    server_settings,
)
from shoal.models.check import check_model, facts_of
from shoal.models.config import OwnModelConfig
from shoal.paramserver.config import rule_problems
from shoal.replicas.refusals import idle_replica_settings, replica_problems
from shoal.telemetry.config import parse_window
from shoal.telemetry.loggers import check_loggers
from shoal.telemetry.summaryfile import read_summary
from shoal.telemetry.tensorboard import wants_curves
from shoal.trainer.claim import (
    check_claim,
    choose_run_dir,
    ends_alike,
    list_gentler,
    pin_data,
    read_plan,
    require_run_dir,
)
from shoal.trainer.config import Recipe, load_recipe
from shoal.trainer.elastic.limits import elastic_warnings, refuse_elastic
from shoal.trainer.online.config import check_publish
from shoal.trainer.online.follow import check_follow, follow_warnings


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What the user asked for, as given."""

    recipe: Path
    plan: str | None = None
    num_processes: int | None = None
    overrides: tuple[str, ...] = ()
    run_dir: Path | None = None
    resume: bool = False
    may_start: bool = False
    """With ``resume``: start a run where there is no run directory to go on in."""
    has_hosts: bool = False
    """``num_processes`` is the room that named hosts have."""
    ranks_here: int | None = None
    """Ranks on this host; all of them when left out."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that was checked: what will run, where, for how long."""

    recipe: Recipe
    setup: RunSetup
    spec: DataSpec
    run_dir: Path
    resume: bool
    warnings: tuple[str, ...] = ()
    """What the user should know before it starts."""


class OwnParts(Protocol):
    """What only building the user's own data or module can tell. It imports torch, so the caller brings it."""

    def measure_data(self, recipe: Recipe) -> DataSummary:
        """Count the samples of the user's own data; called only where the recipe names such data."""

    def check_same_data(self, recipe: Recipe, checkpoints: Path) -> None:
        """Refuse to go on with other data than the newest checkpoint of a folder; called only for the user's own data."""

    def check_optimizer(self, recipe: Recipe) -> None:
        """Refuse an optimizer that torch does not have or that cannot be used; called only where a class of torch is named."""

    def check_callbacks(self, recipe: Recipe) -> None:
        """Refuse callbacks and metrics of the user's own that cannot be imported or made; called only where one is named."""

    def check_weights(self, recipe: Recipe, spec: DataSpec) -> None:
        """Refuse weights or groups of parameters that do not fit the model's names; called only where the recipe has such."""

    def check_plan(self, recipe: Recipe, plan: Plan) -> None:
        """Refuse a resolved plan that a module cannot be laid out by; called only where nothing but building it can tell."""

    def check_fragments(self, recipe: Recipe, spec: DataSpec, plan: Plan) -> None:
        """Refuse more fragments of ``sync=stream`` than the model has parameters; called only where the plan has any."""

    def try_parts(self, recipe: Recipe, plan: Plan) -> tuple[str, ...]:
        """Refuse data, model and loss that do not fit one another; warnings on them. Called only where one is the user's own."""


def prepare(request: TrainRequest, *, own: OwnParts) -> Prepared:
    """Check a request and derive what it left open.

    Args:
        request: what the user asked for.
        own: builds the user's own data and module where the recipe names them.

    Raises:
        RequestError: one message with the numbers and the fix.
    """
    recipe, plan, resolved = read_request(request)
    run_dir = choose_run_dir(request.recipe.stem, given=request.run_dir, resume=request.resume)
    if request.resume and not request.may_start:
        require_run_dir(run_dir)
    if request.resume:
        refuse_only_aside(RunDir(run_dir).checkpoints, parts=recipe.checkpoint.place == "hosts")
    recipe = pin_data(recipe, RunDir(run_dir) if request.resume else None)
    check_claim(run_dir, recipe, resume=request.resume)
    prepared = check_parts(recipe, plan, resolved, run_dir=run_dir, resume=request.resume, own=own, tries=True)
    readers = prepared.setup.world_size - (prepared.setup.plan.ps or 0)
    check_room(recipe.data, num_ranks=request.ranks_here or readers)
    is_own = isinstance(recipe.data, OwnDataConfig)
    if is_own and request.resume and not recipe.checkpoint.other_data and already_finished(prepared) is None:
        own.check_same_data(recipe, RunDir(run_dir).checkpoints)
    found = (
        *prepared.warnings,
        *list_gentler(RunDir(run_dir), recipe),
        *_odd_files(run_dir),
        *(_other_agreement(run_dir, prepared.setup.plan) if request.resume else ()),
    )
    return replace(prepared, warnings=found)


def _other_agreement(run_dir: Path, plan: Plan) -> Iterator[str]:
    """A run that goes on under another ``sync`` or ``compress`` learns otherwise from here on, and what those kept is gone."""
    if not RunDir(run_dir).plan.exists():
        return
    before = Plan.parse(text := read_plan(run_dir))
    if (before.sync, before.compress) != (plan.sync, plan.compress):
        yield (
            f"this run had the plan {text!r} and goes on as {str(plan)!r}: replicas agree in another way from here on; "
            f"give --plan {text!r} to keep it"
        )


def already_finished(prepared: Prepared) -> dict[str, Any] | None:
    """The summary of a run that has done all its steps and is asked to go on; None for every other request."""
    if not prepared.resume:
        return None
    summary = read_summary(prepared.run_dir)
    if summary is None or summary["status"] != "completed":
        return None
    # Who asks for another end than the one that it came to, or for none, wants it to go on.
    is_early = summary.get("stopped_by") == EARLY_STOP and ends_alike(RunDir(prepared.run_dir), prepared.recipe)
    if summary["steps"] < prepared.setup.total_steps and not is_early:
        return None
    # Done is done only if its last checkpoint can still be read; otherwise the steps since the one before are done again.
    newest = newest_whole(RunDir(prepared.run_dir).checkpoints).path
    return summary if newest is not None and newest.name == step_name(summary["steps"]) else None


def say_finished(run_dir: Path, summary: Mapping[str, Any], wanted: int) -> str:
    """That a run has nothing left to do; mentions what was asked for where that is another number."""
    steps = summary["steps"]
    if summary.get("stopped_by") == EARLY_STOP and steps < wanted:
        return f"{run_dir} stopped early, after {steps} of {wanted} steps, as train.early_stop asked; nothing to do"
    asked = f", and {wanted} were asked for" if wanted < steps else ""
    return f"{run_dir} has completed its {steps} steps{asked}; nothing to do"


def check_parts(
    recipe: Recipe,
    plan: Plan,
    resolved: ResolvedPlan,
    *,
    run_dir: Path,
    resume: bool,
    own: OwnParts,
    tries: bool = False,
) -> Prepared:
    """Check the data, the model and the settings of a request that was read.

    Args:
        recipe: with the resolved plan.
        plan: as it was chosen.
        resolved: what follows from it.
        run_dir: where it will run.
        resume: whether it goes on there.
        own: builds the user's own data and module where the recipe names them.
        tries: runs them too.

    Raises:
        RequestError: one message with the numbers and the fix.
    """
    data = check_data(recipe.data)
    if data.spec is None:
        data = own.measure_data(recipe)
    assert data.spec is not None and data.train is not None, "data that was measured has a spec and a length"
    check_model(recipe.model, data.spec)
    refuse_settings(recipe, plan)
    check_group(recipe.elastic, resolved.plan, rate_rule=recipe.optim.scale)
    refuse_elastic(recipe, resolved.plan)
    wants_curves(recipe.telemetry, recipe.log)
    check_loggers(recipe.log)
    _check_callbacks(recipe, plan, data, own=own)
    if recipe.optim.is_torch_class:
        own.check_optimizer(recipe)
    if SyncRule.parse(plan.sync).fragments > 1:
        own.check_fragments(recipe, data.spec, plan)
    named = (
        _without_init(recipe) if resume and not plan.ps and newest_whole(RunDir(run_dir).checkpoints).path else recipe
    )
    if named.model.init is not None or named.model.lora is not None or named.optim.groups:
        own.check_weights(named, data.spec)
    # Before the plan is held to the module: one that cannot run has nothing that a plan could split.
    tried = try_own_parts(recipe, resolved.plan, own=own) if tries else ()
    facts = facts_of(recipe.model, data.spec)
    if facts is not None:
        plan.check(facts)
    if _asks_the_module(recipe, plan, facts):
        own.check_plan(recipe, resolved.plan)
    _check_place(recipe, resolved.plan)
    check_follow(recipe.data, resolved.plan)
    check_publish(recipe.publish, resolved.plan, num_validation=data.validation, saves_every=recipe.checkpoint.every)
    setup = resolve_run(recipe.train, resolved, num_samples=data.train, tokens_per_sample=data.spec.tokens_per_sample)
    if recipe.optim.schedule == "plateau" and recipe.eval.every == 0:
        raise RequestError(
            "optim.schedule plateau lowers the rate after evaluations, and eval.every is 0: there would be none; set eval.every"
        )
    if recipe.train.rollback_after and recipe.checkpoint.every == 0:
        raise RequestError(
            f"train.rollback_after {recipe.train.rollback_after} goes back to a checkpoint, and checkpoint.every is 0: "
            "there would be none; set checkpoint.every"
        )
    return Prepared(
        recipe=recipe,
        setup=setup,
        spec=data.spec,
        run_dir=run_dir,
        resume=resume,
        warnings=(
            *_warnings(recipe, setup.total_steps, count_updates(setup.plan, setup.total_steps)),
            *_server_warnings(recipe, setup.plan),
            *_idle_warnings(recipe, setup.plan),
            *_codec_warnings(recipe, setup.plan, setup.total_steps),
            *_round_warnings(recipe, setup.plan, setup.total_steps),
            *elastic_warnings(recipe, setup.plan),
            *tried,
        ),
    )


def _check_place(recipe: Recipe, plan: Plan) -> None:
    """Refuse a place of checkpoints that this run cannot have.

    Raises:
        RequestError: says why, and the fix.
    """
    place, address = recipe.checkpoint.place, recipe.checkpoint.address
    if plan.ps and place not in ("auto", "shared"):
        raise RequestError(
            f"plan {str(plan)!r}: checkpoint.place {place!r} is for ranks that save together; parameter servers write into one "
            'folder that all of them see: leave it out, or set it to "shared"'
        )
    if address is not None:
        check_address(address, plan.world_size)


def _without_init(recipe: Recipe) -> Recipe:
    """The recipe of a run that goes on: its weights are those of its checkpoint, and what it began from may be gone."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"init": None})})


def _check_callbacks(recipe: Recipe, plan: Plan, data: DataSummary, *, own: OwnParts) -> None:
    """Refuse callbacks and metrics that this run cannot have.

    Raises:
        RequestError: names the key, and the fix.
    """
    check_followed(
        recipe.callbacks,
        recipe.train.early_stop,
        metrics=recipe.eval.metrics,
        evaluate_every=recipe.eval.every,
        num_validation=data.validation,
    )
    kind = data.spec.kind if data.spec is not None else "own"
    for name in recipe.eval.metrics:
        of_numbers = name in ("mae", "rmse")
        if not is_own(name) and kind != "own" and of_numbers != (kind == "regression"):
            fits = "mae, rmse" if kind == "regression" else "accuracy, top5, perplexity, f1"
            raise RequestError(f"eval.metrics: {name!r} makes no sense for data of the kind {kind}; take one of {fits}")
        if is_own(name) and plan.cp > 1:
            raise RequestError(
                f"eval.metrics: {name!r} needs whole outputs, and under cp={plan.cp} a rank has a part of each sequence; leave "
                "one of the two out"
            )
    asked = {
        "callbacks": recipe.callbacks,
        "eval.metrics": recipe.eval.metrics,
        "train.early_stop": recipe.train.early_stop is not None,
        "log.to": recipe.log.to,
    }
    key = next((key for key, is_asked in asked.items() if is_asked), None)
    if plan.ps and key is not None:
        raise RequestError(
            f"plan {str(plan)!r}: {key} needs a loop of steps that all ranks take together, which parameter servers have not; "
            f"leave {key} out, or use dp={plan.workers}"
        )
    if any(map(is_own, recipe.eval.metrics)) or any(isinstance(one, OwnCallbackConfig) for one in recipe.callbacks):
        own.check_callbacks(recipe)


def read_request(request: TrainRequest) -> tuple[Recipe, Plan, ResolvedPlan]:
    """The recipe of a request with its plan filled in, the plan as it was chosen, and what is resolved from it.

    Raises:
        RequestError: the recipe or the plan is wrong.
    """
    recipe = load_recipe(request.recipe, request.overrides)
    num_processes = request.num_processes
    if request.has_hosts and recipe.elastic.mode == "shrink" and Plan.parse(request.plan or recipe.plan).dp is not None:
        # Hosts may have room for other numbers of replicas than the plan has; whoever places ranks looks at that.
        num_processes = None
    plan = choose_plan(recipe.plan, plan_text=request.plan, num_processes=num_processes)
    sizes = recipe.paramserver.unit_sizes(plan.num_shares)
    resolved = resolve_plan(recipe.train, plan, sizes=sizes)
    return recipe.model_copy(update={"plan": str(resolved.plan)}), plan, resolved


def refuse_settings(recipe: Recipe, plan: Plan) -> None:
    """Refuse settings of the recipe that this plan cannot carry out.

    Raises:
        RequestError: lists them with their fixes.
    """
    plan = plan.with_islands
    check_settings(recipe.train, plan)
    check_compression(recipe.settings, plan)
    found = adapt_problems(recipe.optim, recipe.train, plan, evaluate_every=recipe.eval.every)
    if plan.ps:
        found += [
            *server_settings(recipe.train, recipe.optim, plan),
            *order_problems(recipe.data),
            *rule_problems(
                recipe.paramserver,
                plan,
                global_batch=recipe.train.global_batch,
                micro_batch=recipe.train.micro_batch,
                precision=recipe.train.precision,
                weight_decay=recipe.optim.weight_decay,
            ),
        ]
    if plan.islands > 1:
        skips = recipe.train.nonfinite == "skip"
        rule, every = SyncRule.parse(plan.sync), recipe.eval.every
        found += replica_problems(recipe.replicas, rule, evaluate_every=every, leaves_out=skips)
    if found:
        raise RequestError("\n".join(f"plan {str(plan)!r}: {problem}" for problem in found))


def try_own_parts(recipe: Recipe, plan: Plan, *, own: OwnParts) -> tuple[str, ...]:
    """Remarks on what a recipe names of the user's own, of which only running it can tell whether it fits the rest.

    Raises:
        RequestError: it does not.
    """
    has_own = isinstance(recipe.model, OwnModelConfig) or isinstance(recipe.data, OwnDataConfig)
    has_own = has_own or recipe.model.loss is not None or any(map(is_own, recipe.eval.metrics))
    return own.try_parts(recipe, plan) if has_own else ()


def _odd_files(run_dir: Path) -> Iterator[str]:
    """What is in a run directory, is not what its name says, and can be done without."""
    summary = RunDir(run_dir).summary
    if summary.exists() and read_summary(run_dir) is None:
        yield f"{summary} is not a summary; it is passed over, and written anew"


def _asks_the_module(recipe: Recipe, plan: Plan, facts: ModelFacts | None) -> bool:
    """True where only building the module can tell whether the plan fits it."""
    if facts is None:
        return asks_the_model(plan) or plan.ps > 0
    config = recipe.pipeline
    # A shipped model's numbers say whether it can be cut into so many stages, but not whether at these places.
    return plan.pp > 1 and (facts.num_units is None or bool(config.stages) or config.memory is not None)


def _server_warnings(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What parameter servers do otherwise than replicas."""
    if not plan.ps:
        return
    if recipe.eval.every:
        yield f"eval.every {recipe.eval.every}: parameter servers evaluate at the end only"
    if plan.backup == 0:
        yield f"backup=0: the death of a server takes all {plan.ps} back to the newest checkpoint; backup=1 survives it"
    if recipe.telemetry.profile is not None:
        yield f"telemetry.profile {recipe.telemetry.profile} has no effect with parameter servers"
    if plan.compress is not None and has_residual(CompressRule.parse(plan.compress), recipe.compression):
        where = f"compress={plan.compress} keeps what it has not sent in the memory of each of the {plan.num_shares} workers"
        rule = UpdateRule.parse(plan.update or "bsp")
        if rule.kind != "bsp" or recipe.paramserver.aggregate != "average":
            said = "one that starts again, and a run that is resumed, begins with nothing kept; checkpoints have it under bsp"
        elif not recipe.checkpoint.every:
            said = "and with checkpoint.every 0 no checkpoint has it; set checkpoint.every"
        else:
            said = (
                f"checkpoints of every {recipe.checkpoint.every} steps have it, and the last one of a run that stops between "
                "has not; a worker that starts again begins with nothing kept"
            )
        yield f"{where}: {said}"


def _idle_warnings(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Settings of parameter servers in a run that has none. A warning, because recipes are compared by ``--plan dp=N``."""
    config = recipe.paramserver
    # By value: a run's own recipe.toml has every key filled in.
    changed = [name for name, field in type(config).model_fields.items() if getattr(config, name) != field.default]
    if changed and not plan.ps:
        named = ", ".join(f"paramserver.{name}" for name in changed)
        yield f"{named}: no effect, because the plan {str(plan)!r} has no parameter servers; add ps and workers, or leave it out"


def _codec_warnings(recipe: Recipe, plan: Plan, total_steps: int) -> Iterator[str]:
    """Codecs, or settings of theirs, that will have no effect."""
    config = recipe.compression
    used = ("weights", "block", "min_elements") if config.weights != "none" else ()
    fields = type(config).model_fields.items()
    changed = [name for name, field in fields if getattr(config, name) != field.default and name not in used]
    if plan.compress is None:
        if changed:
            named = ", ".join(f"compression.{name}" for name in changed)
            yield f"{named}: no effect, because the plan {str(plan)!r} compresses nothing; add compress, such as compress=int8"
        return
    rule = CompressRule.parse(plan.compress)
    comes_back = plan.ps == 0 and not plan.sync.startswith("gossip") and (plan.islands > 1 or plan.zero == 0)
    if idle := idle_settings(config, rule, comes_back=comes_back):
        named = ", ".join(f"compression.{name}" for name in idle)
        yield f"{named}: no effect with the plan {str(plan)!r}; leave it out, or use a codec that reads it"
    if rule.start >= total_steps:
        yield f"compress={plan.compress} begins after the {total_steps} steps: nothing is compressed"


def _round_warnings(recipe: Recipe, plan: Plan, total_steps: int) -> Iterator[str]:
    """Ways to agree that cost more than they bring, islands that will never meet, and settings that nobody looks at."""
    yield from costly_ways(plan, recipe.optim.name)
    rule = SyncRule.parse(plan.sync)
    if idle := idle_replica_settings(recipe.replicas, rule, is_compressed=plan.compress is not None):
        named = ", ".join(f"replicas.{name}" for name in idle)
        yield f"{named}: no effect with sync={plan.sync}; leave it out, or use a policy that reads it"
    if not rule.is_island_rule or rule.seconds is not None:
        return
    if rule.start >= total_steps:
        yield f"sync={plan.sync} begins after the {total_steps} steps: islands sum their gradients all the time"
    elif rule.start + rule.period > total_steps:
        yield (
            f"sync={plan.sync} has its first round after step {rule.start + rule.period}, and the run has {total_steps} steps: "
            f"islands never agree, and what is saved is the mean of models that were trained apart; use a shorter period, such "
            f"as {max(1, (total_steps - rule.start) // 4)}, or more steps"
        )


def _warnings(recipe: Recipe, total_steps: int, total_updates: int) -> Iterator[str]:
    """Settings that will have no effect, or not the one that was meant."""
    yield from follow_warnings(recipe.data)
    if recipe.optim.warmup >= total_updates:
        yield f"optim.warmup {recipe.optim.warmup} is not below the {total_updates} steps: the rate never reaches optim.lr"
    if recipe.telemetry.profile is not None and parse_window(recipe.telemetry.profile)[0] > total_steps:
        yield f"telemetry.profile {recipe.telemetry.profile} begins after the {total_steps} steps: there will be no trace"
