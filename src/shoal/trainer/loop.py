"""The training loop, as a generator: ``for info in trainer.training_steps(): ...`` and do what you like between steps.

A ``Trainer`` runs a plain module on as many processes as its launcher started; recipes build one in ``trainer/build.py``.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from shoal.checkpoint.config import CheckpointConfig
from shoal.comm.mesh import Mesh
from shoal.comm.world import World, join_world
from shoal.compression.config import CompressionConfig
from shoal.core.errors import RunError
from shoal.core.events import RunEnded, StepDone
from shoal.core.plan import Plan
from shoal.core.rundir import make_run_dir
from shoal.core.units import parse_duration
from shoal.data.loading.loader import StepBatch
from shoal.data.order import Position
from shoal.data.source import Splits
from shoal.engine.async_pipeline import AsyncPipeline, nonfinite_error
from shoal.engine.batches.growing import DataVersions
from shoal.engine.batches.loading import RoundBatches
from shoal.engine.batches.schedule import batch_at
from shoal.engine.callbacks.build import cache_reports, early_stopping
from shoal.engine.config import Settings, TrainConfig
from shoal.engine.evaluate import Evaluation
from shoal.engine.hooks import Hook, StepResult, check_hooks
from shoal.engine.meancheck import find_other_mean
from shoal.engine.metrics import Metric, build_metrics
from shoal.engine.model import ParallelModel
from shoal.engine.objective import AnyLoss, settle_loss
from shoal.engine.parallelize import parallelize
from shoal.engine.reporting import Reporter, describe_draws
from shoal.engine.resolve import RunSetup, asks_the_model, present_plan, resolve_alone, updates_per_step
from shoal.engine.state import RankState, seed_process
from shoal.engine.stop import StopRequest
from shoal.launch.config import ProcessConfig
from shoal.launch.environments import read_place
from shoal.launch.processor import avoid_hidden_tiles
from shoal.optim.adapt import scaled
from shoal.optim.config import OptimConfig
from shoal.optim.rates import after_evaluation
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.parallel.replica_check import check_replicas
from shoal.pipeline.config import PipelineConfig
from shoal.replicas.config import ReplicaConfig
from shoal.telemetry.config import LogConfig, TelemetryConfig
from shoal.telemetry.loggers import Logger
from shoal.telemetry.statusboard import FinalStatus, RankStatus
from shoal.telemetry.stepclock import StepTimes
from shoal.telemetry.trace import Tracer
from shoal.trainer.config import EvalConfig
from shoal.trainer.online.publisher import Publisher
from shoal.trainer.persist import Persistence
from shoal.trainer.progress import Boundaries, Progress, after_step, loss_limit, signed, wants_rollback, went_on
from shoal.trainer.samedata import SameData
from shoal.trainer.setbacks import Setbacks
from shoal.trainer.steprate import StepRate, build_adapt, window_rates


class Trainer:
    """A run of one model under one plan. Use it as a context manager: leaving it closes files, threads and groups."""

    def __init__(
        self,
        model: nn.Module,
        data: Splits,
        *,
        loss: AnyLoss | None = None,
        train: TrainConfig,
        optim: OptimConfig | None = None,
        evaluation: EvalConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        telemetry: TelemetryConfig | None = None,
        elastic: ProcessConfig | None = None,
        parallel: ParallelConfig | None = None,
        pipeline: PipelineConfig | None = None,
        replicas: ReplicaConfig | None = None,
        compression: CompressionConfig | None = None,
        plan: Plan | None = None,
        setup: RunSetup | None = None,
        run_dir: Path | str | None = None,
        resume: bool = False,
        prefetch: int = 2,
        workers: int = 0,
        rank_status: RankStatus | None = None,
        world: World | None = None,
        environment: Mapping[str, str] | None = None,
        was_tried: bool = False,
        recovers: bool = False,
        hooks: Iterable[Hook] = (),
        metrics: Iterable[Metric] = (),
        loggers: Iterable[Logger] = (),
        log: LogConfig | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        hooks, loss, optim = check_hooks(hooks), settle_loss(loss, model, data), optim or OptimConfig()
        if run_dir is not None:
            make_run_dir(run_dir := Path(run_dir))
        avoid_hidden_tiles(os.environ)
        self.settings = Settings.of(train, scaled(optim, train.global_batch), parallel, pipeline, replicas, compression)
        self.eval_config, self.data = evaluation or EvalConfig(), data
        self.metrics = [*build_metrics(self.eval_config.metrics), *metrics]
        deadline, telemetry = (elastic or ProcessConfig()).collective_deadline, telemetry or TelemetryConfig()
        self.prefetch, self.workers, self.memory_every = prefetch, workers, telemetry.memory_every
        self.world = world or join_world(
            read_place(os.environ if environment is None else environment), deadline_seconds=deadline
        )
        self.same_data = SameData(self.world, data)
        samples, tokens = len(data.train), data.spec.tokens_per_sample
        size = {"world_size": self.world.size, "num_logical": self.world.planned_replicas}
        self.setup = resolve_alone(train, plan, setup=setup, num_samples=samples, tokens_per_sample=tokens, **size)
        self.plan, self.total_steps = self.setup.plan, self.setup.total_steps
        self.reporter = Reporter(
            run_dir, world=self.world, config=telemetry, rank_status=rank_status, total_steps=self.total_steps
        )
        self.status: FinalStatus = "completed"
        self.boundaries = Boundaries()
        self._looked_for_draws = False
        self.publisher: Publisher | None = None
        try:
            self.reporter.add_loggers(log, loggers, facts=self.settings.describe() | {"plan": str(self.plan)})
            self.tracer = Tracer(telemetry.profile, run_dir, self.world.rank) if telemetry.profile and run_dir else None
            if not was_tried and (warning := find_other_mean(model, loss, data.train, plan=self.plan, train=train)):
                self.reporter.warn(warning)
            self.adapt, self.growth = build_adapt(optim, train, every := self.eval_config.every, self.reporter)
            hooks = [*hooks, *early_stopping(train.early_stop, every), *([self.adapt] if self.adapt else [])]
            self.engine = self._lay_out(model, loss, hooks + cache_reports(data.train, self.reporter), stop)
            self.persistence = self._open_persistence(run_dir, checkpoint or CheckpointConfig())
            self.setbacks = Setbacks(train, self.engine, self.persistence)
            first_scale = self.engine.precision.first_loss_scale
            self.progress = signed(Progress(position=Position(), loss_scale=first_scale), self.engine.asynchronous)
            self.receipt = self.persistence.open_receipt(data.train, lambda: self.boundaries.is_kept)
            self.versions = DataVersions(data.train, self.world, self.receipt, self.reporter.event)
            # By replica, not by rank: the ranks that share a replica must draw alike.
            seed_process(train.seed, rank=self.mesh.replica)
            if not recovers:  # Or whoever builds it gives it the state to go on from.
                self._begin(resume=resume)
        except BaseException:
            self.reporter.close(has_failed=True)  # Its thread is nobody else's to end: there is no trainer to close.
            raise

    def _lay_out(self, model: nn.Module, loss: AnyLoss, hooks: list[Hook], stop: StopRequest | None) -> ParallelModel:
        return parallelize(
            model,
            self.data,
            loss,
            plan=present_plan(self.plan, world_size=self.world.size, num_logical=self.world.planned_replicas),
            settings=self.settings,
            world=self.world,
            clock=self.reporter.clock,
            hooks=hooks,
            stop=stop,
        )

    def _open_persistence(self, run_dir: Path | None, config: CheckpointConfig) -> Persistence:
        return Persistence(
            run_dir,
            config=config,
            world=self.world,
            reporter=self.reporter,
            plan=str(self.plan),
            replica=self.mesh.replica,
            seed=self.settings.train.seed,
            data=self.same_data.fingerprint,
        )

    def _begin(self, *, resume: bool) -> None:
        """Go on from a checkpoint, or make sure that there is none."""
        if resume:
            self.resume_from_checkpoint()
        else:
            self.persistence.refuse_checkpoints()
        if (now := len(self.data.train)) != (was := self.setup.train_samples):
            self.reporter.warn(f"the training split had {was} samples when this run was planned, and has {now} now")

    def resume_from_checkpoint(self) -> None:
        """Go on from the newest whole checkpoint, if there is one. All ranks call it together."""
        restored = self.persistence.restore(self._state_at, self.engine.state_to_load)
        if restored is not None:
            self.progress, said = went_on(restored.progress, self.engine.asynchronous)
            self.reporter.tell(*filter(None, [self.engine.restored(), said]))
            self.reporter.tell(f"going on from step {restored.progress.step}, {restored.path}")
            self.recall()
        else:
            self.reporter.tell("there is no checkpoint to go on from; starting at step 0")

    def recall(self) -> None:
        """Give hooks back what the checkpoint kept of them, and heed what they ask for then."""
        self.engine.hooks.load_state(self.progress.callbacks)
        self.versions.go_on(self.progress.position)
        self.reporter.warn(*filter(None, [self.receipt.take_up(self.progress.receipt, self.progress.position)]))
        self._heed()

    def _heed(self) -> None:
        """Do what hooks asked for besides saving and stopping."""
        self.persistence.keep(self.engine.requests.kept)
        self.reporter.tell(*self.engine.requests.take_messages())

    def _state_at(self, progress: Progress) -> RankState:
        """This rank's state as it will be when the run goes on from there, to be written to."""
        if (pipeline := self.engine.asynchronous) is not None:
            pipeline.resume_at(progress.step, signature=progress.async_signature, start=progress.async_start)
        return self.engine.state(progress.step)

    @property
    def model(self) -> nn.Module:
        """The module, laid out on this rank."""
        return self.engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of what this rank updates."""
        return self.engine.optimizer

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands among the others."""
        return self.engine.mesh

    @property
    def stopped_by(self) -> str | None:
        """Why all ranks stop; None while they go on."""
        return self.engine.stop.agreed

    def hash_weights(self) -> str:
        """SHA-256 over the whole weights, the same under every plan; all ranks call it together."""
        return self.engine.hash_weights()

    def request_stop(self, reason: str) -> None:
        """Ask to stop after the current step, on all ranks together; safe to call from a signal handler."""
        self.engine.stop.request(reason)

    def training_steps(self) -> Iterator[StepDone]:
        """Train, yielding after each step; ends when the length is reached or a stop was requested."""
        self._announce()
        limit = self.settings.train.time_limit
        deadline = None if limit is None else time.monotonic() + parse_duration(limit)
        loader = self._open_loader()
        try:
            if (was_taken := self.boundaries.unsettled) is not None:
                self._after_step(self.progress.step, is_taken=was_taken)
            while self.progress.step < self.total_steps and self.stopped_by is None:
                if (grown := self.versions.look(self.progress.position)) is not None:
                    self.progress = replace(self.progress, position=grown)
                    loader.move(grown)
                if deadline is not None and self.world.is_first and time.monotonic() > deadline:
                    self.request_stop("time_limit")
                if self.engine.asynchronous is None:
                    yield self._train_one(loader)
                else:
                    yield from self._train_window(loader, self.engine.asynchronous)
                if wants_rollback(self.progress.recovery, self.settings.train):
                    loader.close()
                    self.progress = self.setbacks.roll_back(self.progress, self._state_at)
                    self.engine.restored()
                    self.recall()
                    loader = self._open_loader()
        finally:
            loader.close()
            if self.tracer is not None:
                self.tracer.close()
        self._finish()

    def train(self) -> None:
        """Train to the end."""
        for _ in self.training_steps():
            pass

    def evaluate(self, split: str = "validation", *, limit: int | None = None) -> Evaluation | None:
        """Loss and accuracy on a held-out split; None when the data has no such split. All ranks call it together."""
        source = getattr(self.data, split)
        if source is None or len(source) == 0:
            return None
        step, batch = self.progress.step, self.eval_config.batch or self.setup.micro_batch
        limit = self.eval_config.samples if limit is None else limit
        found = self.engine.evaluate(source, split=split, batch=batch, limit=limit, step=step, metrics=self.metrics)
        self.reporter.evaluated(found.as_event(step))
        self.reporter.rounds(self.engine.take_rounds())
        self._heed()
        return found

    def _announce(self) -> None:
        self.reporter.started(str(self.plan), step=self.progress.step, engine=self.engine, source=self.data.train)
        self.reporter.tell(*(self.engine.describe() if asks_the_model(self.plan) else ()))
        self.persistence.warn_if_disk_is_short(self.engine.state(self.progress.step), num_parts=self.plan.pp)

    @property
    def batch(self) -> int:
        """Samples of the next step, where its epoch has as many left."""
        planned = batch_at(self.settings.train, self.progress.step, 0 if self.adapt is None else self.adapt.level)
        # With ``elastic.batch`` scale every replica that is present keeps its share.
        return planned * self.engine.mesh.num_sharing(self.plan) // self.plan.num_shares

    def _open_loader(self) -> RoundBatches:
        return RoundBatches(
            self.data.train,
            batch=lambda: self.batch,
            position=self.progress.position,
            micro_batch=self.setup.micro_batch,
            rounds=self.engine.mesh.rounds if self.plan.islands == 1 else [self.engine.mesh.replica],
            num_replicas=self.engine.mesh.num_sharing(self.plan),
            num_islands=self.plan.islands,
            seed=self.settings.train.seed,
            prefetch=self.prefetch,
            workers=self.workers,
            world=self.world,
        )

    def _train_one(self, loader: RoundBatches) -> StepDone:
        step, clock = self.progress.step, self.reporter.clock
        clock.begin(step + 1)
        batch = loader.next()
        clock.loaded()
        if self.tracer is not None:
            self.tracer.before_step(step + 1)
        recovery, scale = self.progress.recovery, self.progress.loss_scale
        limit = loss_limit(recovery, self.settings.train)
        growth = self.growth(self.batch, self.optimizer)
        lr = StepRate(self.settings, self.progress, self.total_steps, self.adapt, growth)
        self.receipt.before_step(batch)
        result = self.engine.train_step(batch, step=step, lr=lr, loss_scale=scale, loss_limit=limit)
        if not self._looked_for_draws:
            self._look_for_draws(loader)
        if result.is_taken or self.setbacks.handle(batch, result, self.progress):
            recovery = after_step(recovery, result.loss, self.settings.train, is_taken=result.is_taken)
            self.progress = replace(self.progress, recovery=recovery)
        done = self._advance(batch, result, lr.value, clock.end())
        self.reporter.step(done)
        self.reporter.spans(done.step)
        self.reporter.rounds(self.engine.take_rounds())
        self._after_step(done.step, is_taken=result.is_taken)
        return done

    def _train_window(self, loader: RoundBatches, pipeline: AsyncPipeline) -> Iterator[StepDone]:
        """Steps of an asynchronous pipeline up to the next point where all stages must be at the same place."""
        step, clock = self.progress.step, self.reporter.clock
        periods = [self.eval_config.every, self.persistence.every, self.settings.train.watch_every, self.memory_every]
        periods += [int(self.engine.hooks.need_every_step), 0 if self.publisher is None else self.publisher.every]
        length = pipeline.window_length(step, self.total_steps, periods) if self.tracer is None else 1
        clock.begin(step + 1, step + length)
        batches = [loader.next() for _ in range(length)]
        clock.loaded()
        if self.tracer is not None:
            self.tracer.before_step(step + 1)
        updates, ticks = updates_per_step(self.plan), pipeline.window_ticks(step, len(batches))
        rates = window_rates(self.settings, self.progress, ticks, self.total_steps * updates, self.adapt)
        results = pipeline.train_steps(batches, step=step, rates=rates)
        if not self._looked_for_draws:
            self._look_for_draws(loader)
        times = clock.end().share(length)
        self.reporter.spans(step + length, num_steps=length)
        for place, (batch, result) in enumerate(zip(batches, results, strict=True)):
            if not result.is_finite:
                raise nonfinite_error(
                    result, step=step + place + 1, plan=self.plan, fallback=self.persistence.fall_back()
                )
            lr = rates[(place + 1) * updates - 1]
            self.receipt.before_step(batch)
            done = self._advance(batch, result, lr, times)
            self.reporter.step(done)
            self._after_step(done.step, is_taken=result.is_taken)
            yield done

    def _look_for_draws(self, loader: RoundBatches) -> None:
        """Say once that draws of random numbers depend on the number of processes, or that an axis crosses between hosts."""
        self._looked_for_draws = True
        self.reporter.warn(*self.mesh.warnings, *describe_draws(self.engine.passes.dropout, loader.loader))

    def _advance(self, batch: StepBatch, result: StepResult, lr: float, times: StepTimes) -> StepDone:
        """The progress after a step, and the event that says so."""
        before, why_constant = self.progress, self.engine.objective.why_constant
        if before.step == 0 and result.grad_norm == 0 and why_constant is not None:
            raise RunError(why_constant)
        tokens = batch.num_samples * self.data.spec.tokens_per_sample
        receipt = self.receipt.after_step(batch)
        position, seconds = batch.position, times.seconds
        self.progress = before.after(result, position=position, tokens=tokens, seconds=seconds, receipt=receipt)
        if self.engine.precision.scales_loss:
            self.progress = replace(self.progress, loss_scale=before.loss_scale.after_step(result.is_finite))
        return StepDone(
            step=self.progress.step,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            samples=batch.num_samples,
            tokens=tokens,
            seconds=seconds,
            data_seconds=times.data_seconds,
            skipped=not result.is_taken,
            loss_scale=before.loss_scale.scale,
            wait_seconds=times.wait_seconds,
            phases=times.phases,
        )

    def _after_step(self, step: int, *, is_taken: bool) -> None:
        """What the recipe wants between steps: evaluation, checkpoints, memory readings, the agreed stop."""
        self.boundaries.note(self.progress, self.engine.hooks.state, unsettled=is_taken)
        if self.adapt is not None:
            self.reporter.adapted(self.adapt.event(step))
        if is_taken:
            lag = 1 if (pipeline := self.engine.asynchronous) is None else pipeline.lag
            self.persistence.take(step + 1 - lag)
        if self.memory_every and (step == 1 or step % self.memory_every == 0):
            self.reporter.memory(self.model, self.optimizer, step=step)
        if self.tracer is not None:
            self.tracer.after_step(step)
        watch_every = self.settings.train.watch_every
        if (watch_every and step % watch_every == 0) or self.persistence.is_due(step):
            self._compare_replicas()
        if self._wants_evaluation(step):
            self._evaluate_validation()
        if (is_asked := self.engine.requests.take_save()) and not self.persistence.is_due(step):
            self._compare_replicas()
        if is_asked or self.persistence.is_due(step):
            self._save()
        self.boundaries.note(self.progress, self.engine.hooks.state)
        if self.publisher is not None:
            self.publisher.after_step(self.progress)

    def _save(self) -> None:
        self.reporter.enter("checkpoint", self.progress.step)
        self.progress = replace(self.progress, callbacks=self.engine.hooks.state(), receipt=self.receipt.agree())
        if self.persistence.save(self.engine.state_to_save(self.progress.step), self.progress):
            for hook in self.engine.hooks:
                hook.on_save(self.progress.step)

    def _compare_replicas(self) -> None:
        """Stop the run if replicas have drifted apart, or their data has changed, before a checkpoint could keep that."""
        self.same_data.check_file(self.reporter.warn)
        if self.settings.train.watch_every == 0 or self.world.size == 1:
            return
        step = self.progress.step
        self.reporter.enter("wait: comparing replicas", step)
        shared = self.engine.replicated_state()
        check_replicas(shared.tensors, shared.placements, self.mesh, step=step, names=shared.all_weights)

    def _wants_evaluation(self, step: int) -> bool:
        is_due = self.eval_config.every > 0 and step % self.eval_config.every == 0
        # Where an evaluation decides something, such as the next rate, the checkpoint must know of it. Otherwise a user who asked
        # to stop need not wait for one, and that of the last step comes after its checkpoint.
        is_idle = self.stopped_by is None and step < self.total_steps
        decides = self.settings.optim.schedule == "plateau" or self.engine.follows_evaluations
        return is_due and (is_idle or decides)

    def _evaluate_validation(self) -> None:
        found = self.evaluate("validation")
        if found is not None:
            plateau = after_evaluation(self.progress.plateau, found.loss, self.settings.optim)
            self.progress = replace(self.progress.validated(found), plateau=plateau)
            self.engine.follow_evaluation(found.loss)

    def _finish(self) -> None:
        """Save, evaluate and settle. The weights come first: a signal may end the run while it evaluates."""
        if self.stopped_by is not None and self.progress.step < self.total_steps and not self.engine.stop.is_decided:
            self.status = "interrupted"
        self._compare_replicas()
        self._save()
        self.persistence.wait()  # An evaluation may fail, and must not take the weights of a whole run with it.
        if self.status == "completed" and not self._wants_evaluation(self.progress.step):
            found = self.evaluate("validation")
            # Not part of the schedule, so it must not count for it: a run that is extended later would not have had it.
            self.progress = self.progress.validated(found)
            if found is not None and math.isfinite(found.loss):
                self.persistence.take(self.progress.step + 1)
        self.reporter.enter("wait: checkpoint", self.progress.step)
        self.persistence.wait()
        self.reporter.memory(self.model, self.optimizer, step=self.progress.step)
        step, seconds = self.progress.step, self.progress.trained_seconds
        self.reporter.event(RunEnded(status=self.status, step=step, seconds=seconds))
        for hook in self.engine.hooks:
            hook.on_end(self.progress.step, self.status)

    def close(self) -> None:
        """Stop threads, flush files, leave the group."""
        self.persistence.close()
        self.reporter.close()
        self.engine.close()
        self.world.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # The peers wait for this process to go: neither a save in flight nor a broken group may hold it.
            self.reporter.close(has_failed=True)
