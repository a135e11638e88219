"""The process of a worker: takes a work unit, pulls weights, computes, pushes, commits, until there is nothing left.

A worker may be a group of such processes, of which the first does all that and the others compute with it (``group.py``).
It holds nothing that matters. Killed, it is replaced by another; taken for dead while it was only slow, it comes back under a new
name and goes on.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch

from shoal.comm.parentdeath import end_if_forked
from shoal.comm.wire.node import new_instance_id
from shoal.engine.model import ParallelModel
from shoal.engine.parallelize import parallelize
from shoal.engine.resolve import count_steps, resolve_plan
from shoal.optim.config import OptimConfig
from shoal.optim.precision import Precision
from shoal.paramserver.config import group_plan, pulls_ahead
from shoal.paramserver.consistency import is_share_of_step
from shoal.paramserver.contact import Evicted
from shoal.paramserver.sharding import Model, cut_for
from shoal.paramserver.worker.client import RunOver
from shoal.paramserver.worker.flat import (
    FlatModel,
    FlatParameters,
    describe_model,
    refuse_batch_norm,
    sparse_parameters,
)
from shoal.serverrun.process import ProcessSpec, attach_status
from shoal.serverrun.worker.connection import Pace, ServerConnection, Worker, describe
from shoal.serverrun.worker.group import GroupLeader, ScatterCollect, follow, join_group
from shoal.serverrun.worker.loops import LocalSteps, run_batch_loop, run_downpour_loop, run_overlapped_loop
from shoal.serverrun.worker.shares import ShareRunner
from shoal.serverrun.worker.watchdog import watch_shares
from shoal.serverrun.worker.worktimes import WorkTimes
from shoal.telemetry.eventlog import EventLog
from shoal.telemetry.statusboard import Heartbeat, RankStatus
from shoal.telemetry.stepclock import StepClock
from shoal.trainer.build import build_parts
from shoal.trainer.samedata import SameData


def work(
    spec: ProcessSpec, connect: Callable[[ProcessSpec, Worker, torch.Tensor | None], ServerConnection] | None = None
) -> str:
    """A worker's life; why the run was stopped, and nothing when it was finished.

    Args:
        spec: this process.
        connect: makes its connection under one name; left out, ``ServerConnection``.
    """
    torch.set_num_threads(spec.threads)
    rank_status = attach_status(spec)
    with Heartbeat(rank_status) if rank_status is not None else contextlib.nullcontext():
        if spec.group_rank:
            serve_group(spec, rank_status)
            return ""
        worker = build_worker(spec, rank_status)
        worker = replace(worker, shares=watch_shares(worker.shares, spec))
        try:
            halt = _work_until_over(spec, worker, connect or ServerConnection)
        finally:
            worker.times.close()
        worker.shares.end()
        return halt


def _work_until_over(
    spec: ProcessSpec,
    worker: Worker,
    connect: Callable[[ProcessSpec, Worker, torch.Tensor | None], ServerConnection],
) -> str:
    """Work under one name, and under another each time that the last is taken for dead."""
    # A worker with steps of its own, or that pulls while it computes, has weights of its own; the servers' are beside them.
    config = spec.recipe.paramserver
    has_own = spec.rule.kind == "downpour" or bool(config.local_steps) or pulls_ahead(config, spec.rule)
    landing = torch.empty_like(worker.flat.weights) if has_own else None
    instance_id, run, owner = spec.instance_id, spec.run, os.getpid()
    while True:
        try:
            connection = connect(replace(spec, instance_id=instance_id, run=run), worker, landing)
        except RunOver:
            return ""
        try:
            choose_loop(spec)(connection, worker, spec)
            return connection.halt
        except RunOver:
            return connection.halt
        except Evicted as error:
            print(f"taken for dead: {error}; coming back under a new name", file=sys.stderr, flush=True)
            instance_id, run = new_instance_id(), connection.run_id
        finally:
            end_if_forked(owner)
            connection.close()


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """Model, data and passes on this process, which is a worker or one rank of one."""

    parallel: ParallelModel
    shares: ShareRunner
    model: Model
    """The trained parameters, whole."""
    dtype: torch.dtype
    """Of these."""
    sparse: frozenset[str]
    """Those that are sent as rows."""
    total_steps: int
    """Of the run."""
    data: Mapping[str, str]
    """The data as this process has it, for admission."""
    times: WorkTimes
    """Where the time of its work units goes."""


def build_worker_parts(spec: ProcessSpec, rank_status: RankStatus | None) -> WorkerParts:
    """Lay the model out as the plan wants it on this process; the ranks of a worker call it together."""
    recipe = spec.recipe
    model, loss, data = build_parts(recipe)
    refuse_batch_norm(model)
    sizes = recipe.paramserver.unit_sizes(spec.plan.num_shares)
    layout = resolve_plan(recipe.train, spec.plan, sizes=sizes)
    world = join_group(spec)
    same_data = SameData(world, data)
    # The servers have the optimizer; one without state costs nothing here.
    plain = OptimConfig(name="sgd", momentum=0.0)
    train = recipe.train.model_copy(update={"global_batch": recipe.train.global_batch // spec.plan.num_shares})
    precision = Precision.named(train.precision)
    dtype = str(precision.weight_dtype).removeprefix("torch.")
    described = {name: spec._replace(dtype=dtype) for name, spec in describe_model(model).items()}
    # Their gradients are added up whole, because torch adds rows up in another order; which rows were touched is found when
    # they are sent.
    sparse = sparse_parameters(model)
    clock = StepClock(rank_status, spans_every=0 if spec.run_dir is None else recipe.telemetry.spans_every)
    parallel = parallelize(
        model,
        data,
        loss,
        plan=group_plan(layout.plan),
        settings=replace(recipe.settings, train=train, optim=plain),
        world=world,
        clock=clock,
    )
    clock.follow(parallel.mesh.traffic)
    shares = ShareRunner(
        parallel,
        data.train,
        seed=recipe.train.seed,
        global_batch=recipe.train.global_batch,
        num_shares=spec.plan.num_shares,
        num_microbatches=layout.plan.microbatches or 1,
        of_the_step=is_share_of_step(spec.rule, recipe.paramserver.aggregate),
        sizes=sizes,
        clock=clock,
    )
    total_steps = count_steps(recipe.train, num_samples=len(data.train), tokens_per_sample=data.spec.tokens_per_sample)
    return WorkerParts(
        parallel=parallel,
        shares=shares,
        model=described,
        dtype=precision.weight_dtype,
        sparse=sparse,
        total_steps=total_steps,
        data=same_data.fingerprint.as_settings(),
        times=WorkTimes(clock, None if spec.run_dir is None else partial(EventLog, spec.run_dir, spec.rank)),
    )


def build_worker(spec: ProcessSpec, rank_status: RankStatus | None) -> Worker:
    """What computes: this process alone, or this one at the head of its group."""
    parts, recipe = build_worker_parts(spec, rank_status), spec.recipe
    parallel = parts.parallel
    shard_map = cut_for(parts.model, spec.plan.ps, config=recipe.paramserver, optimizer=recipe.optim.name)
    if parallel.mesh.everyone.size == 1:
        flat = FlatModel(parallel.model, shard_map, parts.sparse)
        return Worker(flat=flat, shares=parts.shares, total_steps=parts.total_steps, data=parts.data, times=parts.times)
    row = FlatParameters(parts.model, shard_map, parts.sparse)
    deadline = recipe.elastic.collective_deadline
    leader = GroupLeader(
        parts.shares, ScatterCollect(parallel, parts.dtype, row), parallel.mesh.everyone, deadline_seconds=deadline
    )
    return Worker(flat=row, shares=leader, total_steps=parts.total_steps, data=parts.data, times=parts.times)


def serve_group(spec: ProcessSpec, rank_status: RankStatus | None) -> None:
    """The life of a rank of a worker that is not its first."""
    parts = build_worker_parts(spec, rank_status)
    try:
        follow(
            parts.shares, ScatterCollect(parts.parallel, parts.dtype, None), parts.parallel.mesh.everyone, parts.times
        )
    finally:
        parts.times.close()


def choose_loop(spec: ProcessSpec) -> Callable[[ServerConnection, Worker, ProcessSpec], None]:
    """How the plan's update rule wants work units worked off."""
    match spec.rule.kind:
        case "downpour":
            return run_downpour_loop
        case "lbfgs":
            return run_batch_loop
    return run_overlapped_loop if pulls_ahead(spec.recipe.paramserver, spec.rule) else run_plain_loop


def run_plain_loop(connection: ServerConnection, worker: Worker, spec: ProcessSpec) -> None:
    """Work units, one after the other.

    Raises:
        RunOver: the run ended meanwhile.
        Evicted: others do what this worker was doing.
    """
    config = spec.recipe.paramserver
    under_way: Future[bool] | None = None
    held: tuple[int, ...] = ()
    spare = torch.empty_like(worker.flat.gradient) if config.overlap else None
    pace = Pace(spec)
    compute = LocalSteps(connection, worker, spec) if config.local_steps else worker.compute
    while (unit := connection.take(held)) is not None:
        read = connection.pull(unit.need, unit.bound)
        pace.begin()
        computed = compute(unit)
        waited = pace.wait()
        connection.settle(under_way)
        gradient = computed.gradient if spare is None else spare.copy_(computed.gradient)
        push = describe(connection.identity, unit, computed, read=read, waited=waited)
        under_way = connection.hand_in(gradient, push, read)
        # Until its commit is answered it is in this worker's hands, or the update log would take it for lost and give it again.
        held = push.units
        if not config.overlap:
            connection.settle(under_way)
    connection.settle(under_way)
