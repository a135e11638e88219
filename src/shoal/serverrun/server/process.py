"""The process of a server: builds its shards, joins, and serves until the last update is applied and written down."""

import asyncio
import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint.goodness import refuse_only_aside
from shoal.checkpoint.whole import glance
from shoal.comm.wire.node import Node, new_instance_id
from shoal.comm.world import Place, World
from shoal.core.errors import AgreedError, RequestError, RunError
from shoal.core.events import (
    CheckpointFailed,
    Event,
    GradientRefused,
    RunEnded,
    RunStarted,
    StepDone,
    UpdateApplied,
    WentBack,
)
from shoal.core.rundir import RunDir
from shoal.data.order import position_of
from shoal.data.source import Splits
from shoal.elastic.view import View
from shoal.engine.resolve import count_steps, count_updates, updates_per_step
from shoal.engine.state import draw_outline, named_weights
from shoal.optim.build import build_optimizer, decide_groups
from shoal.optim.precision import Precision
from shoal.optim.rates import rate
from shoal.paramserver.consistency import Lateness
from shoal.paramserver.contact import Contact, Evicted
from shoal.paramserver.log.commands import CommandLog, restart_update_log, update_log_after
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.messages import FINISHED, Halt, Join
from shoal.paramserver.records import PushId, Update
from shoal.paramserver.server.server import Server
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.server.vectors import LbfgsShard
from shoal.paramserver.sharding import Shard, cut_for
from shoal.paramserver.worker.flat import describe_model, refuse_batch_norm
from shoal.serverrun.notices import describe_refusal, describe_rollback
from shoal.serverrun.process import ProcessSpec, attach_status, open_finder, open_node
from shoal.serverrun.server.checkpointing import LOG_KEY, ServerCheckpointer, load_shard, read_checkpoint
from shoal.telemetry.statusboard import Heartbeat
from shoal.trainer.build import build_parts
from shoal.trainer.progress import Progress
from shoal.trainer.reporting import Reporter
from shoal.trainer.samedata import SameData, data_values, refuse_other_data

Conclude = Callable[[str], None]
"""Called, in a thread, with why the run was stopped (nothing when it was finished), when its last checkpoint is written."""


_UNTOLD = 64
"""Steps and updates that a server remembers in case it becomes the one to tell of them."""


async def serve(
    spec: ProcessSpec,
    *,
    conclude: Conclude | None = None,
    make_source: "Callable[[ProcessSpec], ShardSource] | None" = None,
) -> str:
    """A server's life.

    Args:
        spec: this process.
        conclude: called on the server that leads the log in the end, while it is still a member.
        make_source: makes what shards are made of; left out, ``ShardSource``.

    Returns:
        Why the run was stopped; empty when it was finished.

    Raises:
        RunError: a shard cannot go on here, or the last checkpoint could not be written.
    """
    torch.set_num_threads(spec.threads)
    rank_status = attach_status(spec)
    beating = Heartbeat(rank_status) if rank_status is not None else None
    source = (make_source or ShardSource)(spec)
    world = World(Place(rank=spec.rank, world_size=spec.num_ranks), device=torch.device("cpu"), deadline_seconds=0.0)
    reporter = Reporter(
        spec.kept_dir,
        world=world,
        config=spec.recipe.telemetry,
        rank_status=rank_status,
        total_steps=source.total_steps,
    )
    try:
        while True:
            node = open_node(spec)
            try:
                return await _serve(spec, source, reporter, node, conclude)
            except Evicted as error:
                if spec.cluster is None:
                    raise  # There is a job, which starts it again.
                print(f"taken for dead: {error}; coming back under a new name", file=sys.stderr, flush=True)
                spec = replace(spec, instance_id=new_instance_id(), resume=True)
                source.come_back(spec)
            finally:
                await node.close()
    finally:
        reporter.close()
        if beating is not None:
            beating.stop()


async def _serve(
    spec: ProcessSpec, source: "ShardSource", reporter: Reporter, node: Node, conclude: Conclude | None
) -> str:
    model = {name: (spec.shape, spec.dtype) for name, spec in source.model.items()}

    started = time.time()

    def introduce(view: View | None) -> Join:
        return Join(
            name=spec.name,
            role="server",
            address=address,
            model=model,
            view=view,
            settings=spec.settings,
            data=source.same_data.fingerprint.as_settings(),
            origin=spec.origin,
            started=started,
        )

    contact = Contact(node, find=open_finder(spec, node), introduce=introduce)
    recorder = ServerRecorder(spec, source, reporter)
    server = Server(
        node,
        contact,
        make_shard=source.make_shard,
        make_copy=source.make_copy,
        make_log=source.make_log,
        rate=source.rate,
        on_update=recorder.take_update,
        deadline_seconds=spec.recipe.paramserver.deadline,
        go_back=recorder.go_back,
        on_not_finite=lambda identity, reason: recorder.take_refusal(contact.view, identity, reason),
    )
    address = await node.listen(spec.address, server.handle)
    contact.start()
    reporter.event(
        RunStarted(
            plan=str(spec.plan),
            world_size=spec.plan.world_size,
            step=source.start.step if source.start is not None else 0,
            generation=0,
            pid=0,
        )
    )
    following = asyncio.ensure_future(server.follow())
    try:
        while not following.done():
            contact.check()
            await asyncio.wait([following, server.failure], timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            if server.failure.done():
                server.failure.result()
            is_needed = any(server.is_primary(shard) for shard in server.replicas)
            if contact.halt == FINISHED and not following.done() and not is_needed:
                # The last checkpoint is written, and nothing of this server's is in it: it came back too late to be needed.
                return contact.stopped
        following.result()
        await recorder.finish(server)
        if conclude is not None and server.is_primary(0):
            await asyncio.to_thread(conclude, contact.stopped)
        return contact.stopped
    finally:
        following.cancel()
        await asyncio.to_thread(recorder.close)
        if spec.cluster is not None:
            await contact.leave("it has ended")
        await contact.stop()
        await server.close()


@contextlib.contextmanager
def ends_the_run() -> Iterator[None]:
    """Inside, a failure is one that every server would have again: it ends the run, where a dead server would be started anew.

    Raises:
        RequestError: in place of a ``RunError``.
    """
    try:
        yield
    except RunError as error:
        raise RequestError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run goes on."""

    path: Path
    manifest: str
    """The hash of its manifest: nothing is read of another checkpoint that has taken its name."""
    step: int
    progress: Progress
    update_log: str | None


class ShardSource:
    """Everything that shards and the update log are made of, at the beginning or from the newest checkpoint."""

    def __init__(self, spec: ProcessSpec) -> None:
        recipe = spec.recipe
        whole, _, data = build_parts(recipe)
        refuse_batch_norm(whole)
        self.module: nn.Module = whole.to(dtype=Precision.named(recipe.train.precision).weight_dtype)
        self.data: Splits = data
        # Alone: ranks compare their data among them, these processes do at admission.
        alone = World(Place(), device=torch.device("cpu"), deadline_seconds=0.0)
        self.same_data = SameData(alone, data)
        self.spec = spec
        self.model = describe_model(self.module)
        self.shard_map = cut_for(self.model, spec.plan.ps, config=recipe.paramserver, optimizer=recipe.optim.name)
        self.total_steps = count_steps(
            recipe.train, num_samples=len(data.train), tokens_per_sample=data.spec.tokens_per_sample
        )
        self.num_steps = self.total_steps
        """Steps that this run makes; its learning rates are those of ``total_steps``."""
        self.outline = draw_outline(self.module)
        self.saved_names = {entry.parameter: name for name, entry in self.outline.items() if entry.parameter}
        trained = {self.saved_names[name] for name in self.model}
        self.fixed = {
            f"weights/{name}": tensor for name, tensor in named_weights(self.module).items() if name not in trained
        }
        self._groups = decide_groups(recipe.optim, self.module)
        self.start: Start | None = None
        self.look()
        # The first optimizer of a process makes torch import seconds of code; members are silent meanwhile, so it is done now.
        build_optimizer(recipe.optim, nn.Linear(1, 1))

    def come_back(self, spec: ProcessSpec) -> None:
        """Begin anew, with the newest checkpoint."""
        self.spec = spec
        self.look()

    def look(self, *, again: bool = False) -> None:
        """Find the checkpoint to go on from; ``again`` when everyone goes back to the newest one, whoever wrote it."""
        found = read_checkpoint(self.spec.kept_dir) if self.spec.resume or again else None
        self.start = None
        if found is None and self.spec.resume:
            with ends_the_run():
                refuse_only_aside(RunDir(self.spec.kept_dir).checkpoints)
        if found is not None:
            path, manifest, progress, update_log = found
            accepted = self.spec.recipe.checkpoint.other_data
            with ends_the_run():
                try:
                    warning = refuse_other_data(glance(path).values, self.same_data.fingerprint, accepted=accepted)
                except AgreedError as error:
                    raise AgreedError(f"cannot go on from {path}: {error}") from None
            if warning is not None:
                print(f"warning: {warning}", file=sys.stderr, flush=True)
            self.start = Start(
                path=path, manifest=manifest, step=progress.step, progress=progress, update_log=update_log
            )

    def rate(self, number: int) -> float:
        """The learning rate of an update."""
        if self.spec.rule.kind == "lbfgs":
            return self.spec.recipe.paramserver.lbfgs_lr
        return rate(self.spec.recipe.optim, number, count_updates(self.spec.plan, self.total_steps))

    def make_shard(self, number: int) -> ShardState:
        """A shard as it is before the first update that this run makes."""
        state = self.make_copy(number)
        if self.start is not None:
            version = self._make_update_log().closed
            load_shard(state, self.start.path, self.saved_names, version=version, expect=self.start.manifest)
        return state

    def make_copy(self, number: int) -> ShardState:
        """A shard that another server's copy will fill. No checkpoint is read for it: the one that was the newest when this
        server started may be gone by now."""
        state = self._empty_shard(self.shard_map.shards[number])
        state.load_weights({name: tensor.detach() for name, tensor in self.module.named_parameters()})
        return state

    def _empty_shard(self, shard: Shard) -> ShardState:
        config = self.spec.recipe.paramserver
        if self.spec.rule.kind == "lbfgs":
            return LbfgsShard(shard, model=self.model, groups=self._groups, history=config.lbfgs_history)
        return ShardState(
            shard,
            model=self.model,
            optim=self.spec.recipe.optim,
            groups=self._groups,
            aggregation="adasum" if config.aggregate == "adasum" else "sum",
            compensation=config.delay_compensation,
        )

    def make_log(self) -> CommandLog:
        """The update log before the first update that this run makes."""
        every = self.spec.recipe.checkpoint.every
        return CommandLog(self._make_update_log(), cut_every=every * self.spec.plan.num_shares)

    def _make_update_log(self) -> UpdateLog:
        spec, config = self.spec, self.spec.recipe.paramserver
        shares = spec.plan.num_shares
        update_log = UpdateLog(
            rule=spec.rule,
            workers=shares,
            steps=self.num_steps,
            lateness=Lateness(staleness_aware=config.staleness_aware, drop_beyond=config.drop_beyond),
            duplicate_after=config.duplicate_after,
            warm_start=config.warm_start,
            aggregate=config.aggregate,
            mean_steps=sum(map(config.own_steps, range(shares))) / shares,
        )
        if self.start is None:
            return update_log
        again = None
        if self.start.update_log is not None:
            again = restart_update_log(self.start.update_log, rule=str(spec.rule), workers=shares, steps=self.num_steps)
        return again or update_log_after(self.start.step, update_log, updates_per_step=updates_per_step(self.spec.plan))


class ServerRecorder:
    """What a server writes down: steps, where it leads the log, and its part of every checkpoint."""

    def __init__(self, spec: ProcessSpec, source: ShardSource, reporter: Reporter) -> None:
        self._spec = spec
        self._source = source
        self._reporter = reporter
        self._saver = ServerCheckpointer(
            spec.kept_dir,
            config=spec.recipe.checkpoint,
            plan=str(spec.plan),
            outline=source.outline,
            fixed=source.fixed,
            deadline_seconds=spec.recipe.paramserver.deadline,
            report=self._report,
            settle=reporter.flush,
        )
        self._begin()

    def _begin(self) -> None:
        source, recipe = self._source, self._spec.recipe
        self._progress = (
            source.start.progress
            if source.start is not None
            else Progress(position=position_of(0, len(source.data.train), recipe.train.global_batch))
        )
        if source.start is not None:
            self._saver.begin(source.start.step, source.make_log().update_log.closed)
        self._reported = self._progress.step
        self._since = time.monotonic()
        self._losses: list[tuple[float, float]] = []
        self._samples = 0
        self._untold: deque[StepDone | UpdateApplied] = deque(maxlen=_UNTOLD)

    async def go_back(self, view: View) -> None:
        """Everyone goes back to the newest checkpoint: one that is being written here has to be there first, or not at all."""
        await asyncio.to_thread(self._saver.close)
        await asyncio.to_thread(self._source.look, again=True)
        self._begin()
        if any(self._spec.instance_id in chain.synced for chain in view.chains):
            # Not one that comes later: it gets what the others have made since, and never reads the checkpoint.
            back = WentBack(step=self._progress.step, died=view.lost, history=view.history)
            self._reporter.event(back)
            print(describe_rollback(back.as_dict()), file=sys.stderr, flush=True)

    def take_refusal(self, view: View | None, identity: PushId, reason: str) -> None:
        """A gradient was refused because it is not finite."""
        member = view.find(identity.worker) if view is not None else None
        refused = GradientRefused(
            step=self._reported,
            worker=identity.worker if member is None else member.name,
            push=f"{identity.worker}/{identity.number}",
            reason=reason,
        )
        self._reporter.event(refused)
        print(describe_refusal(refused.as_dict()), file=sys.stderr, flush=True)

    async def take_update(self, server: Server, made: Update, cut: str | None) -> None:
        """An update is applied to every shard here."""
        self._losses.append((made.loss, made.weight))
        self._samples += made.samples
        if math.isfinite(made.loss):
            self._saver.take(made.versions)
        step = made.settled // self._spec.plan.num_shares
        if not self._spec.rule.is_stepwise or made.num_duplicates:
            self._untold.append(self._update_applied(server, made))
        if step > self._reported:
            self._untold.append(self._step_done(step, made))
        if server.log_leader is not None:
            # With what the log leader before this one may not have come to tell; of two tellings the later counts.
            while self._untold:
                told = self._untold.popleft()
                self._reporter.step(told) if isinstance(told, StepDone) else self._reporter.event(told)
        if cut is not None:
            await self._save(server, cut)

    def _update_applied(self, server: Server, made: Update) -> UpdateApplied:
        view, lr, entries = server.contact.view, self._source.rate(made.number), made.entries
        found = [view.find(entry.worker) if view is not None else None for entry in entries]
        return UpdateApplied(
            update=made.number,
            step=self._reported,
            lr=lr,
            workers=tuple(entry.worker if one is None else one.name for entry, one in zip(entries, found, strict=True)),
            units=made.units,
            read=made.versions,
            staleness=tuple(made.number - version for version in made.versions),
            step_sizes=tuple(lr * entry.factor for entry in entries),
            num_duplicates=made.num_duplicates,
        )

    def _step_done(self, step: int, made: Update) -> StepDone:
        now = time.monotonic()
        weight = sum(weight for _, weight in self._losses)
        loss = sum(loss * weight for loss, weight in self._losses) / weight if weight else math.nan
        tokens = self._samples * self._source.data.spec.tokens_per_sample
        seconds, samples = now - self._since, self._samples
        self._reported, self._since, self._losses, self._samples = step, now, [], 0
        self._progress = self._progress_at(step, loss, tokens, seconds)
        return StepDone(
            step=step,
            loss=loss,
            lr=self._source.rate(made.number),
            grad_norm=None,
            samples=samples,
            tokens=tokens,
            seconds=seconds,
            data_seconds=0.0,
        )

    def _progress_at(self, step: int, loss: float, tokens: int, seconds: float) -> Progress:
        before = self._progress
        return Progress(
            step=step,
            position=position_of(step, len(self._source.data.train), self._spec.recipe.train.global_batch),
            first_loss=loss if before.first_loss is None else before.first_loss,
            last_loss=loss,
            tokens=before.tokens + tokens,
            trained_seconds=before.trained_seconds + seconds,
        )

    async def _save(self, server: Server, cut: str, *, is_last: bool = False) -> None:
        update_log = json.loads(cut)
        # Every server says the same, so only what all of them know alike: the numbers of a step are the log leader's alone.
        shares = self._spec.plan.num_shares
        step = (
            update_log["portions"]["opened"] * shares
            - len(update_log["portions"]["todo"])
            - len(update_log["portions"]["doing"])
            - sum(len(one["portions"]) for one in update_log["pending"])
        ) // shares
        progress = Progress(
            step=step, position=position_of(step, len(self._source.data.train), self._spec.recipe.train.global_batch)
        )
        values = {
            "progress": progress.as_values(),
            **data_values(self._source.same_data.fingerprint),
            LOG_KEY: update_log,
        }
        with ends_the_run():
            self._source.same_data.check_file(self._reporter.warn)
        save = self._saver.save_last if is_last else self._saver.save
        await save(server, values, step=step, version=update_log["trimmed"])

    async def finish(self, server: Server) -> None:
        """The last checkpoint, and a word to the others that it is over.

        Raises:
            RunError: it could not be written.
        """
        if server.last_cut:
            await self._save(server, server.last_cut, is_last=True)
        is_interrupted = server.contact.halt not in ("", FINISHED)
        status = "interrupted" if is_interrupted else "completed"
        self._reporter.event(RunEnded(status=status, step=self._reported, seconds=self._progress.trained_seconds))
        try:
            await server.contact.tell(Halt(reason=FINISHED), deadline=2.0)
        except TimeoutError:
            print("no center to tell that the run is over", file=sys.stderr)

    def close(self) -> None:
        """Stop the writer."""
        self._saver.close()

    def _report(self, event: Event) -> None:
        self._reporter.event(event)
        if isinstance(event, CheckpointFailed):
            print(f"checkpoint at step {event.step} was not saved: {event.reason}", file=sys.stderr, flush=True)
