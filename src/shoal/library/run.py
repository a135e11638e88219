"""``shoal.Run``: a script's own loop, with its own model, optimizer, scheduler and data, under any plan.

    with shoal.Run(plan="dp=2 zero=1", run_dir="runs/mine") as run:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = run.loader(dataset, global_batch=32)
        model, optimizer = run.setup(model, optimizer, loss=nn.CrossEntropyLoss())
        for batch in loader:
            loss = run.forward_backward(batch)
            run.clip(1.0)
            optimizer.step()
            run.log(loss=loss)

The same script runs under ``python`` (one process), ``torchrun`` and ``shoal run SCRIPT --plan TEXT``. Everything that is not a
method of ``run`` is plain PyTorch.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.checkpoint.config import CheckpointConfig
from shoal.comm.world import World, join_world
from shoal.compression.config import CompressionConfig
from shoal.core.config import validate
from shoal.core.errors import EXIT_SIGINT, EXIT_SIGTERM, RequestError, RunError
from shoal.core.events import RunEnded, StepDone
from shoal.core.plan import Plan
from shoal.data.loading.loader import StepBatch
from shoal.engine.config import Settings, TrainConfig
from shoal.engine.evaluate import Evaluation
from shoal.engine.hooks import Hook, StepResult, check_hooks
from shoal.engine.metrics import Metric, as_metrics
from shoal.engine.objective import StepFunction
from shoal.engine.parallelize import parallelize
from shoal.engine.reporting import Reporter
from shoal.engine.resolve import check_samples, resolve_plan
from shoal.engine.state import seed_for_build
from shoal.engine.stop import StopRequest
from shoal.launch.config import ProcessConfig
from shoal.launch.environments import attach_status, read_place
from shoal.launch.processor import avoid_hidden_tiles
from shoal.library.arguments import as_folder, as_loggers, as_section, check_evaluation, check_processor
from shoal.library.detours import Detours
from shoal.library.loader import RunLoader, check_batch, held_out, read_options
from shoal.library.process import (
    IS_RUNNING,
    OPEN,
    PLAN_VARIABLE,
    RESUME_VARIABLE,
    RUN_DIR_VARIABLE,
    open_run_dir,
    read_plan,
    refuse_replica_settings,
)
from shoal.library.saved import SavedRun
from shoal.library.setups import (
    ModelSetup,
    notes_on,
    others_frozen,
    refuse_constant,
    refuse_functions,
    refuse_other_weights,
    refuse_sharing,
    refuse_unkept,
    refuse_words,
    sort_companions,
)
from shoal.models.build import refuse_lazy
from shoal.replicas.config import ReplicaConfig
from shoal.telemetry.config import LogConfig, TelemetryConfig
from shoal.telemetry.summaryfile import write_summary


class Run(SavedRun):
    """A script's own training run on this rank. Use it as a context manager: leaving it saves, closes files and leaves the group.

    Args:
        plan: how the run is laid out, as text or a ``Plan``; left out, that of ``shoal run``, else one replica per process.
        seed: of initial weights, sample order and dropout.
        run_dir: where events, checkpoints and the summary go; left out, that of ``shoal run``, else nothing is kept.
        resume: go on from the newest checkpoint in ``run_dir`` before the first batch; left out, where ``shoal run --resume`` or
            a restart asks for it.
        precision: of arithmetic: float32, bfloat16, float64, or float16, whose loss is scaled and whose overflows are left out.
        checkpoint: which checkpoints are kept: the settings of a recipe's ``[checkpoint]``.
        hooks: called at fixed points of training, for every model that is set up.
        loggers: where numbers go besides: names such as ``mlflow``, and objects with ``log(values, step)``.
        batch_norm: ``local`` or ``sync`` statistics over replicas.
        unused_parameters: allow parameters that a step does not touch.
        threads: compute threads of this process; left out, torch's own choice.
        deadline: seconds that a collective may take.
        telemetry: what is recorded: the settings of a recipe's ``[telemetry]``.
        replicas: how islands agree beyond the plan's ``sync``: the settings of a recipe's ``[replicas]``.
        compression: how the plan's ``compress`` is done: the settings of a recipe's ``[compression]``.
        world: the processes, where they are joined already.
    """

    def __init__(
        self,
        plan: str | Plan | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        *,
        resume: bool | None = None,
        precision: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
        checkpoint: CheckpointConfig | Mapping[str, Any] | None = None,
        hooks: Sequence[Hook] = (),
        loggers: Sequence[Any] = (),
        batch_norm: Literal["local", "sync"] = "local",
        unused_parameters: bool = False,
        threads: int | None = None,
        deadline: float | None = None,
        telemetry: TelemetryConfig | Mapping[str, Any] | None = None,
        replicas: Mapping[str, Any] | None = None,
        compression: Mapping[str, Any] | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self._asked = read_plan(plan if plan is not None else os.environ.get(PLAN_VARIABLE))
        self.seed = seed
        self.run_dir = as_folder(run_dir if run_dir is not None else os.environ.get(RUN_DIR_VARIABLE))
        self._resume = bool(os.environ.get(RESUME_VARIABLE)) if resume is None else resume
        if resume and self.run_dir is None:
            raise RequestError("resume=True goes on from the checkpoints of a run directory; give run_dir=")
        self._train = {
            "seed": seed,
            "precision": precision,
            "batch_norm": batch_norm,
            "unused_parameters": unused_parameters,
        }
        self._config(1)  # So that a wrong value is told of here.
        check_processor(threads, deadline)
        self._keep = as_section(CheckpointConfig, checkpoint, "checkpoint")
        self._replicas = as_section(ReplicaConfig, replicas, "replicas")
        refuse_replica_settings(self._asked, self._replicas)
        self._codec = as_section(CompressionConfig, compression, "compression")
        self._telemetry = as_section(TelemetryConfig, telemetry, "telemetry")
        self._deadline = ProcessConfig().collective_deadline if deadline is None else deadline
        self._threads, self._given_world = threads, world
        self._loggers = as_loggers(loggers)
        self.hooks = list(check_hooks(hooks))
        """Called at fixed points of training; those that are added before ``setup`` are those of its model."""
        self.stop = StopRequest()
        """This run's request to stop; ``run.stop.request("reason")`` asks all ranks to stop after the current step."""
        self.status = "completed"
        self.metrics: Mapping[str, float] = {}
        """What the script's own step returned beside the loss of the newest batch, over the global batch."""
        self._batch: StepBatch | None = None
        self._detours: dict[ModelSetup, Detours] = {}

    # --- the processes

    def start(self) -> "Run":
        """Begin the run without ``with``; ``run.close()`` writes the last checkpoint, and ``shoal run`` calls it at the end."""
        return self.__enter__()

    def __enter__(self) -> "Run":
        """Join the other processes, and seed all of them alike: what is built from here on is the same on every rank."""
        avoid_hidden_tiles(os.environ)
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._started = time.monotonic()
        place = read_place(os.environ)
        self._resume = self._resume or place.generation > 0
        self._status = attach_status(os.environ) if self._given_world is None else None
        self.world = self._given_world or join_world(place, deadline_seconds=self._deadline)
        self.plan = self._fit(self._asked)
        if self.run_dir is not None:
            open_run_dir(self.run_dir)
        self._reporter = Reporter(
            self.run_dir, world=self.world, config=self._telemetry, rank_status=self._status, total_steps=0
        )
        names = tuple(one for one in self._loggers if isinstance(one, str))
        own = [one for one in self._loggers if not isinstance(one, str)]
        self._reporter.add_loggers(
            validate(LogConfig, {"to": names}, origin="loggers"), own, facts={"plan": str(self.plan)}
        )
        self._listen()
        IS_RUNNING.set()
        OPEN.append(self)
        seed_for_build(self.seed)
        return self

    @property
    def step_count(self) -> int:
        """Updates of the first optimizer that was set up, since the beginning of the run."""
        self._begin("run.step_count")
        return self._num_steps

    # --- the parts

    def loader(
        self, dataset: Any, global_batch: int | None = None, *, micro_batch: int | None = None, **options: Any
    ) -> RunLoader:
        """Batches of a dataset in an order that is the same under every plan.

        Args:
            dataset: map-style or iterable, of ``(inputs, targets)`` pairs or dicts; or ``Splits``.
            global_batch: samples per step, over all replicas; there is no default.
            micro_batch: samples per forward pass; left out, as the plan says.
            options: those of ``LoaderOptions``, under the names of torch's ``DataLoader``: ``shuffle``, ``sampler``,
                ``collate_fn``, ``num_workers``, ``drop_last`` and so on.

        Raises:
            RequestError: the plan's replicas do not divide the batch, the dataset is none, or an option does not fit.
        """
        wanted, train = read_options(dataset, options, global_batch), self._config(global_batch, micro_batch)
        made = RunLoader(
            dataset,
            resolved=resolve_plan(train, self.plan),
            global_batch=train.global_batch,
            seed=self.seed,
            options=wanted,
            world=self.world,
            place=self._replica(),
            is_stopping=lambda: self.is_stopping,
            begin=self._begin,
            between=self._between,
            loading=self._reporter.clock.loading,
        )
        check_samples(num_samples=len(made.source), replicas=made.resolved.plan.num_shares)
        self._loaders.append(made)
        return made

    def _config(self, global_batch: int | None, micro_batch: int | None = None) -> TrainConfig:
        given = {"steps": 1, "global_batch": global_batch, "micro_batch": micro_batch, **self._train}
        return validate(TrainConfig, given, origin="shoal.Run")

    def setup(
        self,
        model: nn.Module,
        *companions: Any,
        loss: Callable[..., torch.Tensor] | None = None,
        step: Callable[[nn.Module, Any], Any] | None = None,
        data: RunLoader | None = None,
        name: str | None = None,
        hooks: Sequence[Hook] = (),
    ) -> Any:
        """Lay a model out as the plan says; returns the model, its optimizer and its schedulers, in the order of the arguments.

        The objects stay the same ones. The optimizer's groups get this rank's tensors, so ``optimizer.step()`` and schedulers
        work as always. A model without an optimizer (a frozen teacher) is only moved to this rank's device.

        Args:
            model: built alike on every rank.
            companions: its optimizer, and schedulers of that.
            loss: of the model's output and the targets; left out with ``step`` too, what the targets say (cross entropy of
                classes, squares of numbers), or the loss that the model's own output has.
            step: in place of a loss: a function of the model and a batch that gives the mean loss, or a dict with ``loss`` and
                metrics, which are then in ``run.metrics``.
            data: the loader whose batches it will get; left out, the first that was made.
            name: what it is called in checkpoints, where there are several models.
            hooks: of this model alone, besides those of the run.

        Raises:
            RequestError: the plan does not fit the model, the optimizer's class cannot be cut into shards, or the model shares
                trained parameters, a hook's state or a name with one that is set up.
        """
        optimizer, schedulers = sort_companions(companions, model)
        refuse_functions(loss, step, has_optimizer=optimizer is not None)
        refuse_words(data, name)
        if optimizer is None:
            model.to(self.device)
            return (model, *companions) if companions else model
        scored = StepFunction(step) if step is not None else loss
        loader = data if data is not None else self._loaders[0] if self._loaders else None
        if loader is None:
            raise RequestError("run.setup looks at the data: make a loader with run.loader(...) before it")
        label = name if name is not None else f"model{len(self._setups)}" if self._setups else ""
        refuse_sharing(self._setups, model, label, self.hooks)
        refuse_lazy(model)
        followers = [*self.hooks, *check_hooks(hooks)]
        refuse_unkept(followers, has_folder=self.run_dir is not None)
        refuse_other_weights(model, self.world)
        plan, train = loader.resolved.plan, self._config(loader.global_batch)
        notes = notes_on(model, scored, optimizer, plan=plan, train=train, source=loader.source, others=self._setups)
        self._reporter.warn(*notes)
        engine = parallelize(
            model,
            loader.splits,
            scored,
            plan=plan,
            settings=Settings(train=train, replicas=self._replicas, compression=self._codec),
            world=self.world,
            clock=self._reporter.clock,
            hooks=followers,
            stop=self.stop,
            optimizer=optimizer,
        )
        made = ModelSetup(engine, schedulers, label, loader.splits)
        self._detours[made] = Detours(made, self.world, has_codec=self._codec.weights != "none")
        engine.optimizer.register_step_post_hook(lambda *_: self._after_update(made))
        self._setups.append(made)
        self._leave()
        return (engine.model, *companions)

    # --- the steps

    def forward_backward(self, batch: StepBatch, *, model: nn.Module | None = None) -> float:
        """Leave the gradient of a global batch in the optimizer's tensors; returns its loss. All ranks call it together.

        Gradients of the batch before are forgotten: there is nothing to zero.

        Args:
            batch: of a loader of this run.
            model: which one, where several are set up.
        """
        own, loss = self._pass(batch, model)
        own.engine.end_step(is_taken=not own.is_overflown)
        if said := own.why_not_finite(loss):
            self._reporter.warn(said)
        self._leave()
        return loss

    def _pass(self, batch: StepBatch, model: nn.Module | None) -> tuple[ModelSetup, float]:
        """The gradient of a batch in its model, and its loss."""
        check_batch(batch)
        if self._is_closed:
            raise RequestError("this run is over: steps are made inside `with shoal.Run(...)`, and before run.close()")
        self._begin()
        own = self._of(model)
        if said := self._detours[own].before_pass(batch):
            self._reporter.warn(said)
        with others_frozen(self._setups, own), own.calling():
            loss = own.run_pass(batch)
        if own.num_passes == 0:
            refuse_constant(own)
        own.num_passes += 1
        self.metrics = dict(own.engine.metrics)
        own.last_loss, own.last_norm = loss, None
        self._batch = batch
        self._count(batch)
        if self._first_loss is None:
            self._first_loss = loss
        return own, loss

    def clip(self, max_norm: float | None = None, *, model: nn.Module | None = None) -> float:
        """The norm of the whole gradient, over all ranks, which is then scaled down to ``max_norm``."""
        own = self._of(model)
        own.engine.max_norm = own.longest_gradient(max_norm)
        own.last_norm = own.engine.clip()
        return own.last_norm

    def step(self, batch: StepBatch, *, max_norm: float | None = None, model: nn.Module | None = None) -> StepResult:
        """All of a step: forward, backward, clip, optimizer, schedulers. One whose loss or gradient is not finite is left out.

        A ``ReduceLROnPlateau`` is left to the script, which steps it with what an evaluation found.

        Args:
            batch: of a loader of this run.
            max_norm: the longest gradient allowed; None for any.
            model: which one, where several are set up.
        """
        own, loss = self._pass(batch, model)
        norm = self.clip(max_norm, model=own.engine.model)
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        own.engine.end_step(is_taken=is_finite)
        if is_finite:
            own.optimizer.step()
            for scheduler in own.schedulers:
                if not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()
        else:
            own.passes_at_update = own.num_passes
            self._reporter.warn(own.leave_out(self._num_steps + 1, f"loss {loss}, norm of the gradient {norm}"))
        self._leave()
        return StepResult(loss=loss, grad_norm=norm, is_finite=is_finite, is_taken=is_finite, metrics=self.metrics)

    def _after_update(self, own: ModelSetup) -> None:
        """An optimizer of this run was stepped."""
        if self._is_searching:
            return
        if reason := own.why_left_out():
            self._reporter.warn(reason)
            return
        own.num_updates += 1
        own.passes_at_update = own.num_passes
        if self._checkpoints is not None and own is self._setups[0]:
            self._checkpoints.take(own.num_updates)
        result = StepResult(
            loss=own.last_loss or 0.0,
            grad_norm=own.last_norm or 0.0,
            is_finite=True,
            is_taken=True,
            metrics=own.engine.metrics,
        )
        for hook in own.engine.hooks:
            hook.on_update(own.num_updates - 1, result)
        self._reporter.rounds(own.engine.take_rounds())
        self._heed(own)
        if own is not self._setups[0] or self._batch is None:
            return
        times, samples = self._reporter.clock.end(), self._batch.num_samples
        self._samples += samples
        self._reporter.step(
            StepDone(
                step=own.num_updates,
                loss=own.last_loss if own.last_loss is not None else math.nan,
                lr=own.lr,
                grad_norm=own.last_norm,
                samples=samples,
                tokens=samples * self._tokens_per_sample,
                seconds=times.seconds,
                data_seconds=times.data_seconds,
                wait_seconds=times.wait_seconds,
                phases=times.phases,
            )
        )
        self._reporter.spans(own.num_updates)
        self._reporter.clock.restart_for(own.num_updates + 1)

    def evaluate(
        self,
        data: Any,
        *,
        model: nn.Module | None = None,
        batch: int | None = None,
        limit: int = 0,
        split: str = "validation",
        metrics: Sequence[Metric | str] = (),
    ) -> Evaluation:
        """Loss and accuracy over a held-out dataset, each sample once over all ranks. All ranks call it together.

        Args:
            data: a dataset, made to batches as the first loader makes its own, or a loader of this run.
            model: which one, where several are set up.
            batch: samples per forward pass; left out, a microbatch.
            limit: samples at most; 0 for all.
            split: what events call it.
            metrics: computed besides: objects, and names such as ``f1`` and ``top5``.
        """
        check_evaluation(data, batch=batch, limit=limit)
        self._begin()
        own = self._of(model)
        source = held_out(data, self._loaders)
        size = batch or (self._loaders[0].resolved.micro_batch if self._loaders else 1)
        with own.calling():
            found = own.engine.evaluate(
                source, split=split, batch=size, limit=limit, step=self._num_steps, metrics=as_metrics(metrics)
            )
        self._evaluated = found
        own.engine.follow_evaluation(found.loss)
        self._reporter.evaluated(found.as_event(self._num_steps))
        self._heed(own)
        self._leave()
        return found

    # --- its end

    def close(self) -> None:
        """Finish: what all ranks do together when the script leaves the run in an orderly way."""
        if self.is_stopping and self._was_signalled():
            self.status = "interrupted"
        if self._checkpoints is not None and self._num_steps:
            self.save(wait=True)
        if self.run_dir is not None and self._setups:
            summary = self._summarise()
            if self.is_main:
                write_summary(self.run_dir, summary)
            self.world.barrier()
        self._reporter.traffic(self._num_steps)
        self._reporter.event(
            RunEnded(status=self.status, step=self._num_steps, seconds=time.monotonic() - self._started)
        )
        for own in self._setups:
            for hook in own.engine.hooks:
                hook.on_end(own.num_updates, self.status)
        self._let_go()
        for own in self._setups:
            own.engine.close()
        if self._given_world is None:
            self.world.close()
        if self._status is not None and self.status == "interrupted":
            self._status.finish("interrupted", stop_signal=self.stop.signal_number)
        if self._checkpoints is not None and self._checkpoints.failure is not None:
            raise RunError(f"the last checkpoint could not be written: {self._checkpoints.failure}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # The peers wait for this process to go: neither a save in flight nor a broken group may hold it.
            self._checkpoints = None
            self._let_go(has_failed=not (isinstance(error, SystemExit) and error.code in (None, 0)))
            return
        self.close()
        if self.status == "interrupted":
            sys.exit(EXIT_SIGINT if self.stop.agreed == "SIGINT" else EXIT_SIGTERM)
