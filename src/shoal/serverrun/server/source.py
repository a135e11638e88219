"""What a server makes its shards and its update log of: the model as it is built, or the newest checkpoint."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint.retention import refuse_only_aside
from shoal.checkpoint.whole import glance
from shoal.comm.world import World
from shoal.core.errors import AgreedError, RequestError, RunError
from shoal.core.place import Place
from shoal.core.rundir import RunDir
from shoal.data.growing import growing
from shoal.data.order import Position
from shoal.data.source import Splits
from shoal.engine.batches.receipt import why_no_receipt
from shoal.engine.resolve import count_steps, count_updates, updates_per_step
from shoal.engine.state import draw_outline, named_weights
from shoal.optim.build import build_optimizer, decide_groups
from shoal.optim.precision import Precision
from shoal.optim.rates import rate
from shoal.paramserver.consistency import Lateness
from shoal.paramserver.epochs import EpochSpan, EpochTable
from shoal.paramserver.log.commands import CommandLog, restart_update_log, update_log_after
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.server.kept import KeptResiduals
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.server.vectors import LbfgsShard
from shoal.paramserver.sharding import Shard, cut_for
from shoal.paramserver.worker.flat import describe_model, refuse_batch_norm
from shoal.serverrun.process import ProcessSpec
from shoal.serverrun.pushes import push_codec, saves_residuals
from shoal.serverrun.server.checkpointing import load_shard, read_checkpoint
from shoal.serverrun.server.residuals import load_residuals
from shoal.trainer.build import build_parts
from shoal.trainer.progress import Progress
from shoal.trainer.samedata import SameData, refuse_other_data

_OWN_SECONDS = 60.0
"""How long shares of workers that keep residuals wait for those that have not come yet: who does a share decides its bits."""


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
        self.num_samples = len(data.train)
        """Of the training split as the run began with it."""
        train = growing(data.train)
        self._version = self.begun_version = 0 if train is None else train.version
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
            said = load_residuals(state, self.start.path, self.saved_names, expect=self.start.manifest)
            if said is not None and number == 0:
                print(f"warning: {said}", file=sys.stderr, flush=True)
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
        state = ShardState(
            shard,
            model=self.model,
            optim=self.spec.recipe.optim,
            groups=self._groups,
            aggregation="adasum" if config.aggregate == "adasum" else "sum",
            compensation=config.delay_compensation,
        )
        state.codec = push_codec(self.spec, self.model, self.total_steps)
        if state.codec is not None and state.codec.saves_residuals:
            state.kept = KeptResiduals(state.codec.kept_numel(shard))
        return state

    def make_log(self) -> CommandLog:
        """The update log before the first update that this run makes."""
        every = self.spec.recipe.checkpoint.every
        return CommandLog(self._make_update_log(), cut_every=every * self.spec.plan.num_shares)

    def _units_per_epoch(self) -> int:
        """Work units of an epoch of which there is a receipt; 0 where there is none: L-BFGS takes whole batches in parts of any
        size, and what has no "once each" has none anywhere."""
        train = self.data.train
        if self.spec.rule.kind == "lbfgs" or why_no_receipt(train):
            return 0
        return math.ceil(self.num_samples / self.spec.recipe.train.global_batch) * self.spec.plan.num_shares

    @property
    def _keeps_residuals(self) -> bool:
        codec = push_codec(self.spec, self.model, self.total_steps)
        return codec is not None and codec.keeps_residual

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
            units_per_epoch=self._units_per_epoch(),
            own_seconds=_OWN_SECONDS if saves_residuals(spec) and self._keeps_residuals else 0.0,
        )
        update_log.receipts.epochs = epochs = self._epochs()
        if self.start is None:
            return update_log
        again = None
        if self.start.update_log is not None:
            again = restart_update_log(self.start.update_log, rule=str(spec.rule), workers=shares, steps=self.num_steps)
        if again is not None:
            again.own_shares = update_log.own_shares
            again.receipts = again.receipts.going_on(self._units_per_epoch(), again.num_settled)
            again.receipts.epochs = epochs
        return again or update_log_after(self.start.step, update_log, updates_per_step=updates_per_step(self.spec.plan))

    def _epochs(self) -> EpochTable | None:
        """Which version each epoch reads: as the checkpoint says it, or from the beginning of the run; None where nothing grows.

        Raises:
            RequestError: the data was followed by the run that saved the checkpoint, and is not by this one.
        """
        found: EpochTable | None = None
        if self.start is not None and self.start.update_log is not None:
            said = json.loads(self.start.update_log).get("receipts", {}).get("epochs")
            found = None if said is None else EpochTable.restore(said)
        elif self.start is not None and self.start.progress.position.version:
            # Of a plan without servers, which has no log.
            found = self._begun_with(self.start.progress.position, self.start.step)
        if growing(self.data.train) is None:
            if found is not None:
                raise RequestError(
                    "the run took up versions of data that grows, and it does not follow it now; set data.follow = true, as the "
                    "run did that saved this"
                )
            return None
        first = EpochSpan(epoch=0, first_step=0, version=self._version, samples=self.num_samples)
        table = found or self._table(first)
        if table.batch != self.spec.recipe.train.global_batch:
            raise RequestError(
                f"the run that follows data saved this with {table.batch} samples a step, and train.global_batch is "
                f"{self.spec.recipe.train.global_batch} now, so that its epochs would begin in the middle of a step; go on with "
                f"train.global_batch={table.batch}"
            )
        table.shares = self.spec.plan.num_shares  # Steps stay as they are, and are shared out anew.
        self.begun_version = table.spans[-1].version
        return table

    def _begun_with(self, position: Position, step: int) -> EpochTable | None:
        train, samples = growing(self.data.train), self.num_samples
        if train is not None:
            if position.version > train.version:
                train.grow(position.version)
            samples = len(train)
        first = step - position.offset // self.spec.recipe.train.global_batch
        return self._table(EpochSpan(epoch=position.epoch, first_step=first, version=position.version, samples=samples))

    def _table(self, first: EpochSpan) -> EpochTable:
        return EpochTable(batch=self.spec.recipe.train.global_batch, shares=self.spec.plan.num_shares, first=first)

    @property
    def follows(self) -> bool:
        """True where newer versions of the data are taken up."""
        return growing(self.data.train) is not None

    def newest(self) -> tuple[int, int]:
        """The newest version of the data, and its samples.

        Raises:
            RunError: it has other columns, or samples that the model has no place for.
        """
        train = growing(self.data.train)
        assert train is not None, "nothing grows"
        if (version := train.newest_version()) > train.version:
            train.grow(version)
        return train.version, len(train)
