"""What a server writes down of a run: steps and updates, where it leads the log, and its part of every checkpoint."""

import asyncio
import json
import math
import sys
import time
from collections import deque
from dataclasses import replace

from shoal.core.events import (
    CheckpointFailed,
    EpochReceipt,
    Event,
    GradientRefused,
    RunEnded,
    StepDone,
    UpdateApplied,
    WentBack,
)
from shoal.data.order import position_of
from shoal.data.receipt import Counted, hash_range, refuse_difference
from shoal.elastic.view import View
from shoal.engine.reporting import Reporter
from shoal.paramserver.epochs import EpochTable
from shoal.paramserver.messages import FINISHED, Halt
from shoal.paramserver.receipts import EpochClosed
from shoal.paramserver.records import PushId, Update
from shoal.paramserver.server.server import Server
from shoal.serverrun.notices import describe_refusal, describe_rollback
from shoal.serverrun.process import ProcessSpec
from shoal.serverrun.server.checkpointing import LOG_KEY, ServerCheckpointer
from shoal.serverrun.server.source import ShardSource, ends_the_run
from shoal.telemetry.measurements import QueuesMeasured
from shoal.trainer.progress import Progress
from shoal.trainer.samedata import data_values

_UNTOLD = 64
"""Steps and updates that a server remembers in case it becomes the one to tell of them."""
_LOOK_SECONDS = 1.0
"""Between two looks at the queues."""


class ServerRecorder:
    """What a server writes down: steps, where it leads the log, and its part of every checkpoint."""

    def __init__(self, spec: ProcessSpec, source: ShardSource, reporter: Reporter) -> None:
        self._spec = spec
        self._source = source
        self._reporter = reporter
        self._expected: Counted | None = None
        self._looked = -math.inf
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
            else Progress(position=position_of(0, source.num_samples, recipe.train.global_batch))
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

    def look(self, server: Server) -> None:
        """Write down how long the queues are, on the server that leads the log, and not more often than is worth it."""
        now = time.monotonic()
        if server.log_leader is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        log = server.log_leader.command_log.update_log
        self._reporter.event(
            QueuesMeasured(
                step=self._reported,
                todo=log.units.num_todo,
                in_hand=log.num_in_hand,
                waiting=log.num_done - log.num_settled,
                unapplied=max(0, log.closed - server.version),
            )
        )

    async def take_update(self, server: Server, made: Update, cut: str | None) -> None:
        """An update is applied to every shard here."""
        self._losses.append((made.loss, made.weight))
        self._samples += made.samples
        if math.isfinite(made.loss):
            self._saver.take(made.versions)
        step = made.settled // self._spec.plan.num_shares
        for closed in made.epochs:
            await self._settle(server, closed)
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

    async def _settle(self, server: Server, closed: EpochClosed) -> None:
        """The end of an epoch: its work units must be every sample once.

        Raises:
            RequestError: they are not; every server finds the same, so it ends the run.
        """
        counted = closed.counted
        event = EpochReceipt(
            epoch=closed.epoch, rows=counted.rows, ok=None, sum=f"{counted.total:032x}", reason=closed.reason
        )
        expected = None
        if not closed.reason:
            expected = await asyncio.to_thread(self._whole, closed.samples)
            total = f"{expected.total:032x}"
            event = replace(event, ok=counted == expected, expected_rows=expected.rows, expected=total)
        if server.log_leader is not None:
            self._reporter.event(event)
        if expected is not None:
            with ends_the_run():
                refuse_difference(closed.epoch, counted, expected)

    def _whole(self, num_samples: int | None) -> Counted:
        """Every sample of the data once, or of an epoch of data that grows; found when it is needed, and kept."""
        wanted = self._source.num_samples if num_samples is None else num_samples
        if self._expected is None or self._expected.rows != wanted:
            # What the data says itself is of its newest version.
            total = getattr(self._source.data.train, "row_hashes", None) if num_samples is None else None
            self._expected = Counted(rows=wanted, total=hash_range(range(wanted)) if total is None else total)
        return self._expected

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
            position=position_of(step, self._source.num_samples, self._spec.recipe.train.global_batch),
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
        position = position_of(step, self._source.num_samples, self._spec.recipe.train.global_batch)
        if (epochs := update_log["receipts"].get("epochs")) is not None:
            position = EpochTable.restore(epochs).position(step)
        progress = Progress(step=step, position=position)
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
