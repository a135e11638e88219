"""From what the user wrote to the plan that runs: degrees, microbatches and length, resolved and checked before anything starts.

Pure functions over numbers, so that a dry run, the launcher and every rank derive the same layout.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.errors import RequestError
from shoal.core.pipelines import DEFAULT_SCHEDULE, schedule_facts
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.core.updaterule import UpdateRule
from shoal.data.order import Position
from shoal.data.spec import UNKNOWN_LENGTH
from shoal.engine.batches.schedule import all_batches, batch_plans, count_scheduled_steps
from shoal.engine.compression.settings import compression_settings as compression_settings
from shoal.engine.config import TrainConfig
from shoal.optim.config import OptimConfig
from shoal.paramserver.config import unit_samples
from shoal.replicas.graphs import mixing
from shoal.schedules.catalogue import fitting_microbatches, schedule_of_plan
from shoal.schedules.schedule import Schedule

DEFAULT_WORKERS = 2
"""Of parameter servers, when neither the plan nor --nproc says."""
MOST_PER_CORE = 32
"""Processes that one machine starts for every core: all techniques can be tried with so many, and each takes a share of memory
that is a model's at best. Beyond them a machine starts processes for minutes before it runs out."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan with everything filled in, and the batch sizes that follow from it."""

    plan: Plan
    micro_batch: int
    """Samples per forward pass."""

    @property
    def world_size(self) -> int:
        """Processes to start."""
        return self.plan.world_size


@dataclass(frozen=True, kw_only=True)
class RunSetup(ResolvedPlan):
    """What a run does: decided once, before any process starts, and handed down to all of them."""

    train_samples: int
    """Of the training split."""
    total_steps: int
    """Optimizer steps that the configured length comes to."""

    def as_dict(self) -> dict[str, int]:
        """What stands beside the plan in ``plan.json``."""
        return {"micro_batch": self.micro_batch, "train_samples": self.train_samples, "total_steps": self.total_steps}


def resolve_run(train: TrainConfig, resolved: ResolvedPlan, *, num_samples: int, tokens_per_sample: int) -> RunSetup:
    """The setup of a run on so many training samples.

    Raises:
        RequestError: there are more replicas than samples.
    """
    check_samples(num_samples=num_samples, replicas=resolved.plan.num_shares)
    return RunSetup(
        plan=resolved.plan,
        micro_batch=resolved.micro_batch,
        train_samples=num_samples,
        total_steps=count_steps(train, num_samples=num_samples, tokens_per_sample=tokens_per_sample),
    )


def resolve_alone(
    train: TrainConfig,
    plan: Plan | None,
    *,
    setup: RunSetup | None = None,
    world_size: int,
    num_samples: int,
    tokens_per_sample: int,
    num_logical: int = 0,
) -> RunSetup:
    """The setup of a run: what was decided before, or, where a script starts it without a launcher, what its plan comes to here.

    Raises:
        RequestError: the plan does not fit so many processes, or the data, or it is another than that of the setup.
    """
    decided = plan if setup is None else setup.plan
    if num_logical and decided is not None:
        world_size = decided.world_size  # Some are absent, and it is none the less the run's plan.
    if setup is not None and plan is None:
        setup.plan.check(world_size=world_size)
        return setup
    plan = plan or Plan()
    if plan.dp is None:
        plan = replace(plan, dp=world_size // (plan.ranks_per_replica * plan.islands))
    plan.check(world_size=world_size)
    found = resolve_run(train, resolve_plan(train, plan), num_samples=num_samples, tokens_per_sample=tokens_per_sample)
    if setup is not None and found.plan != setup.plan:
        raise RequestError(
            f"setup= has the plan '{setup.plan}' and plan= is '{found.plan}'; give one of them, or the same plan in both"
        )
    return setup or found


def present_plan(plan: Plan, *, world_size: int, num_logical: int) -> Plan:
    """How the processes that are present are laid out: as the plan says, with as many replicas as there are.

    Raises:
        RequestError: this plan cannot do without one of its replicas.
    """
    if not num_logical:
        return plan
    refuse_absent_replicas(plan)
    present = world_size // plan.ranks_per_replica
    # One that is left alone has nobody to share its state out to.
    return replace(plan, dp=present, zero=plan.zero if present > 1 else 0)


def refuse_absent_replicas(plan: Plan) -> None:
    """Refuse a plan whose replicas cannot compute the shares of absent ones.

    Raises:
        RequestError: says which part of the plan, and what to do.
    """
    reasons = {
        f"sync={plan.sync}": plan.with_islands.islands > 1,
        f"compress={plan.compress}": plan.compress is not None,
        f"pp={plan.pp}": plan.pp > 1,
        f"ps={plan.ps}": bool(plan.ps),
    }
    for what, is_asked in reasons.items():
        if is_asked:
            raise RequestError(
                f"plan {str(plan)!r}: the replicas that are left cannot compute the shares of absent ones under {what}; leave it "
                "out, or set elastic.mode=restart"
            )


def choose_plan(recipe_plan: str, *, plan_text: str | None, num_processes: int | None) -> Plan:
    """The plan to run. The command line wins over the recipe; ``dp`` takes up the processes that are left over.

    Raises:
        RequestError: the plan cannot run, or its product is not the number of processes asked for.
    """
    if plan_text is not None and not plan_text.strip():
        raise RequestError("--plan is empty; name a plan, such as dp=2, or leave --plan out to use the recipe's")
    text = plan_text if plan_text is not None else recipe_plan
    if text.strip() == "auto":
        raise RequestError(
            "plan 'auto' is picked by `shoal train` for this machine alone; name a plan here, such as dp=2 "
            "(`shoal tune RECIPE` says which is fastest)"
        )
    plan = Plan.parse(text)
    if plan.ps:
        return _with_workers(plan, num_processes=num_processes)
    # A degree in the recipe is a default that --nproc replaces; a degree in --plan is a demand that it must match.
    is_free = plan.dp is None or (plan_text is None and num_processes is not None)
    if is_free:
        # A degree of 0 or less is refused by the check below.
        per_replica = max(1, plan.ranks_per_replica * plan.islands)
        total = per_replica if num_processes is None else num_processes
        if total % per_replica:
            raise RequestError(
                f"plan {text!r}: {total} processes are not a multiple of the {per_replica} that one replica takes; "
                f"start {math.ceil(total / per_replica) * per_replica} processes"
            )
        plan = replace(plan, dp=total // per_replica)
    plan.check(world_size=num_processes)
    return plan


def _with_workers(plan: Plan, *, num_processes: int | None) -> Plan:
    """The plan with its workers and its rule; the processes that are not servers are workers.

    Raises:
        RequestError: the plan cannot run.
    """
    workers = plan.workers
    if workers is None:
        # What a worker's ranks do not divide is left over, and refused by the check below with both numbers.
        each = max(1, plan.ranks_per_replica)
        workers = DEFAULT_WORKERS if num_processes is None else (num_processes - plan.ps) // each
    plan = replace(plan, workers=workers, update=plan.update or "bsp")
    plan.check(world_size=num_processes)
    return replace(plan, update=str(UpdateRule.parse(plan.update or "bsp").resolve(workers)))


def asks_the_model(plan: Plan) -> bool:
    """True when a plan depends on what the model is made of; data parallelism alone does not."""
    return plan.tp > 1 or plan.cp > 1 or plan.pp > 1 or plan.zero > 0 or plan.recompute != "none"


def schedule_of(plan: Plan, *, steps: int = 1) -> Schedule:
    """The pipeline schedule that a resolved plan names, over so many steps without a flush.

    Raises:
        RequestError: it cannot be had in this size; says why.
    """
    return schedule_of_plan(plan, microbatches=plan.microbatches or 1, steps=steps)


def updates_per_step(plan: Plan) -> int:
    """Optimizer updates of one step: PipeDream makes one for every microbatch, asynchronous workers one for every push."""
    if plan.ps:
        rule = UpdateRule.parse(plan.update or "bsp").resolve(plan.num_shares)
        return 1 if rule.is_stepwise else math.ceil(plan.num_shares / ((rule.quorum or 1) * rule.push_every))
    return (plan.microbatches or 1) if plan.pp > 1 and schedule_facts(plan.schedule).updates_each else 1


def count_updates(plan: Plan, total_steps: int) -> int:
    """Updates of a whole run, as a rule; where workers gather several steps before they push there are fewer than steps."""
    if plan.ps:
        rule = UpdateRule.parse(plan.update or "bsp").resolve(plan.num_shares)
        if not rule.is_stepwise:
            return max(1, math.ceil(total_steps * plan.num_shares / ((rule.quorum or 1) * rule.push_every)))
    return total_steps * updates_per_step(plan)


def resolve_plan(train: TrainConfig, plan: Plan, *, sizes: Sequence[float] | None = None) -> ResolvedPlan:
    """Batch sizes for a plan.

    Args:
        train: the ``[train]`` section.
        plan: as chosen.
        sizes: of workers' work units beside each other (``batch_shares``); None: all alike.

    Raises:
        RequestError: the processes do not divide the batch, or two settings contradict each other.
    """
    if plan.ps and sizes is not None:
        # Work units are rounded to whole samples, whatever their number; what does not go with it is refused by
        # ``rule_problems``.
        plan = replace(plan, microbatches=plan.microbatches or 1)
        largest = max(unit_samples(train.global_batch, sizes))
        return ResolvedPlan(plan=plan, micro_batch=math.ceil(largest / (plan.microbatches or 1)))
    plan = plan.with_islands
    check_graph(plan)
    replicas, axis = plan.num_shares, "workers" if plan.ps else "dp" if plan.islands == 1 else "islands x dp"
    if train.global_batch % replicas:
        smaller = train.global_batch - train.global_batch % replicas
        raise RequestError(
            f"train.global_batch {train.global_batch} is not divisible by {axis} {replicas}: replicas would get unequal batches; "
            f"set it to {' or '.join(str(size) for size in (smaller, smaller + replicas) if size)}, "
            f"or change {axis} to a number that divides it"
        )
    share = train.global_batch // replicas
    if plan.pp > 1:
        plan = replace(plan, schedule=plan.schedule or DEFAULT_SCHEDULE)
    if plan.pp > 1 and plan.microbatches is None and train.micro_batch is None:
        assert plan.schedule is not None
        fitting = fitting_microbatches(
            plan.schedule, ranks=plan.pp, samples=share, chunks=plan.chunks, replicas=plan.stage_replicas
        )
        plan = replace(plan, microbatches=fitting)
    micro_batch, count = train.micro_batch, plan.microbatches
    if micro_batch is not None and share % micro_batch:
        raise RequestError(
            f"train.micro_batch {micro_batch} does not divide the {share} samples per replica "
            f"(global_batch {train.global_batch} / {axis} {replicas}); set it to {_divisor_below(share, micro_batch)}"
        )
    if count is not None and share % count:
        raise RequestError(
            f"microbatches={count} does not divide the {share} samples per replica "
            f"(global_batch {train.global_batch} / {axis} {replicas}); set it to {_divisor_below(share, count)}"
        )
    if micro_batch is not None and count is not None and micro_batch * count != share:
        raise RequestError(
            f"train.micro_batch {micro_batch} x microbatches {count} = {micro_batch * count}, "
            f"but a replica has {share} samples per step; leave one of them out"
        )
    if micro_batch is None and count is None and all(batch % replicas == 0 for batch in all_batches(train)):
        share_of_all = math.gcd(*(batch // replicas for batch in all_batches(train)))
    else:
        share_of_all = share
    size = micro_batch if micro_batch is not None else share // count if count is not None else share_of_all
    plan = replace(plan, microbatches=share // size)
    if plan.pp > 1:
        schedule_of(plan)
    for larger in batch_plans(train, plan, size, axis):
        schedule_of(larger)
    return ResolvedPlan(plan=plan, micro_batch=size)


def check_graph(plan: Plan) -> None:
    """Refuse a graph of gossip in a file that cannot be read, or is not for this number of islands.

    Raises:
        RequestError: says what is wrong with it.
    """
    rule = SyncRule.parse(plan.sync)
    if rule.graph is not None and plan.islands > 1:
        mixing(rule.graph, plan.islands, 0, seed=0, is_directed=rule.kind == "pushsum")


def _divisor_below(number: int, wanted: int) -> int:
    return max(candidate for candidate in range(1, max(1, min(wanted, number)) + 1) if number % candidate == 0)


def count_steps(train: TrainConfig, *, num_samples: int, tokens_per_sample: int) -> int:
    """Optimizer steps that the configured length comes to. The last step of an epoch may be short."""
    if train.steps is not None:
        return train.steps
    if num_samples == UNKNOWN_LENGTH:
        raise RequestError(
            "the training data is an iterable dataset that does not say its length, so train.epochs and train.tokens cannot be "
            "counted in steps; set train.steps, or give the dataset __len__"
        )
    if train.batch_schedule is not None:
        samples = (train.tokens or 0) / tokens_per_sample if train.epochs is None else train.epochs * num_samples
        epoch, offset = divmod(math.ceil(round(samples, 6)), num_samples)
        return count_scheduled_steps(train, num_samples=num_samples, target=Position(epoch=epoch, offset=offset))
    steps_per_epoch = math.ceil(num_samples / train.global_batch)
    if train.epochs is not None:
        whole, part = divmod(train.epochs, 1)
        # Rounded first: 1.1 epochs are 1.1000000000000001, and the last bit must not cost a step.
        return int(whole) * steps_per_epoch + math.ceil(round(part * num_samples, 6) / train.global_batch)
    assert train.tokens is not None
    samples = math.ceil(train.tokens / tokens_per_sample)
    epochs, rest = divmod(samples, num_samples)
    return epochs * steps_per_epoch + math.ceil(rest / train.global_batch)


def check_settings(train: TrainConfig, plan: Plan) -> None:
    """Refuse settings of ``[train]`` that this plan cannot carry out.

    Raises:
        RequestError: lists them with their fixes.
    """
    found = setting_problems(plan, compile_model=train.compile, unused_parameters=train.unused_parameters)
    if plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        found += _asynchronous_settings(train, plan)
    if plan.islands > 1:
        found += _island_settings(train, plan)
    if found:
        raise RequestError("\n".join(f"plan {str(plan)!r}: {problem}" for problem in found))


def server_settings(train: TrainConfig, optim: OptimConfig, plan: Plan) -> list[str]:
    """Settings that a plan with parameter servers cannot carry out, each with its fix."""
    found = []
    if optim.clip is not None:
        found.append(
            f"optim.clip {optim.clip:g} needs the norm of the whole gradient, and each of the {plan.ps} servers has a "
            f"shard of it; leave clip out, or use a plan with dp"
        )
    if optim.schedule == "plateau":
        found.append(
            "optim.schedule plateau needs evaluations during training, and parameter servers evaluate at the end; use cosine"
        )
    if train.precision == "float16":
        found.append(
            "train.precision float16 scales its loss by steps that overflow, and workers are at different steps; use bfloat16"
        )
    if train.nonfinite == "skip":
        found.append(
            "train.nonfinite skip leaves out a step on all ranks together, and a server refuses a push that is not finite; "
            "leave nonfinite out"
        )
    if train.spike is not None:
        found.append(
            f"train.spike {train.spike:g} leaves out a step on all ranks together, and workers are at different steps; "
            "leave spike out"
        )
    if train.time_limit is not None:
        found.append(
            f"train.time_limit {train.time_limit} is not there with parameter servers yet; stop the run with SIGTERM, which saves"
        )
    return found


def _island_settings(train: TrainConfig, plan: Plan) -> list[str]:
    """Settings that need all islands to agree about a step before any of them takes it."""
    alone = f"leaves out steps on all ranks together, and islands with sync={plan.sync} take theirs by themselves"
    found = []
    if train.precision == "float16":
        found.append(f"train.precision float16 {alone}; use bfloat16")
    if train.rollback_after:
        found.append(
            f"train.rollback_after {train.rollback_after} goes back on all ranks together, and islands with sync={plan.sync} "
            f"leave steps out by themselves; leave rollback_after out"
        )
    if train.spike is not None:
        found.append(f"train.spike {train.spike:g} {alone}; leave spike out")
    return found


def _asynchronous_settings(train: TrainConfig, plan: Plan) -> list[str]:
    """Settings that need all stages to agree about an update before any of them makes it."""
    found = []
    if train.precision == "float16":
        found.append(
            f"train.precision float16 scales its loss and leaves out steps that overflow, and under schedule={plan.schedule} a "
            f"stage updates before the others know; use bfloat16, or schedule=1f1b"
        )
    if train.nonfinite == "skip":
        found.append(
            f"train.nonfinite skip leaves out a step on all ranks together, and under schedule={plan.schedule} a stage updates "
            f"before the others know; leave it out, or use schedule=1f1b"
        )
    if train.spike is not None:
        found.append(
            f"train.spike {train.spike:g} leaves out a step on all ranks together, and under schedule={plan.schedule} a stage "
            f"updates before the loss is known; leave it out, or use schedule=1f1b"
        )
    return found


def check_samples(*, num_samples: int, replicas: int) -> None:
    """Refuse more replicas than there are samples.

    Raises:
        RequestError: says both numbers.
    """
    if num_samples < replicas:
        raise RequestError(
            f"the training split has {num_samples} samples and the plan has {replicas} replicas: some would never see data; "
            f"use dp={max(1, num_samples)} or fewer, or more data"
        )


def check_processes(count: int) -> None:
    """Refuse more processes than one machine can be asked to run; only who starts them here asks.

    Raises:
        RequestError: both numbers, and what to do with so many.
    """
    most = MOST_PER_CORE * _num_cores()
    if count > most:
        raise RequestError(
            f"{count} processes are asked for, and the {_num_cores()} core(s) of this machine run {most} at most; use --nproc "
            f"{most} or fewer (a plan: fewer ranks), or start them on more machines with a launcher"
        )


def default_threads(num_processes: int) -> int:
    """Compute threads per process where so many processes of a run share this machine."""
    return max(1, _num_cores() // num_processes)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def setting_problems(plan: Plan, *, compile_model: bool = False, unused_parameters: bool = False) -> list[str]:
    """What is wrong with settings of ``[train]`` under a plan.

    Args:
        plan: the plan that will run.
        compile_model: ``train.compile``.
        unused_parameters: ``train.unused_parameters``.
    """
    found = []
    others = [name for name in ("tp", "cp", "pp") if getattr(plan, name) > 1]
    others += [name for name in ("zero",) if plan.zero] + (["recompute"] if plan.recompute != "none" else [])
    if compile_model and others:
        found.append(
            f"train.compile goes with dp alone, and the plan has {' and '.join(others)}: "
            f"a compiled graph would not see the cuts; set train.compile to false, or leave {' and '.join(others)} out"
        )
    if unused_parameters and plan.zero:
        found.append(
            f"train.unused_parameters goes with zero=0, and the plan has zero={plan.zero}: its buckets wait for every gradient; "
            f"freeze the parameters that are not used, or leave zero out"
        )
    return found
