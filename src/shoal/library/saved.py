"""What a script's own run keeps: its checkpoints, taken and loaded by all ranks together, and its summary."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.agreement import agree_on_failure
from shoal.checkpoint.config import CheckpointConfig
from shoal.core.errors import RequestError, RunError
from shoal.core.events import Logged
from shoal.data.loading.loader import StepBatch
from shoal.engine.evaluate import Evaluation
from shoal.engine.exchanged import summarise_exchange
from shoal.engine.objective import describe_value
from shoal.engine.parallelize import example_of
from shoal.engine.reporting import Reporter
from shoal.engine.state import seed_process
from shoal.library.exporting import check_export, write_export
from shoal.library.loader import RunLoader
from shoal.library.process import IS_RUNNING, OPEN, RunProcess
from shoal.library.saving import RunCheckpoints, export_setup, import_setup, merge_states
from shoal.library.setups import ModelSetup
from shoal.telemetry.memory import peak_rss_bytes

_MEETING = 13
"""Numbers that ranks add up when they meet."""


class SavedRun(RunProcess):
    """A run's process with what it has set up, as far as that is saved, loaded and told at the end."""

    run_dir: Path | None
    """Where events, checkpoints and the summary go; None where nothing is kept."""
    seed: int
    """Of initial weights, the order of samples and dropout."""
    _reporter: Reporter
    _keep: CheckpointConfig
    _started: float
    _resume: bool

    def __init__(self) -> None:
        self._checkpoints: RunCheckpoints | None = None
        self._has_begun = self._was_loaded = self._is_closed = False
        self._wants_save = False
        self._last_looked = 0
        """The step after which it was last asked whether a checkpoint is due."""
        self._setups: list[ModelSetup] = []
        self._loaders: list[RunLoader] = []
        self._first_loss: float | None = None
        self._is_searching = False
        self._evaluated: Evaluation | None = None
        self._samples = 0

    def _begin(self, asked: str = "a loader's place") -> None:
        """Before progress is read or made: this replica's own random streams, and what a checkpoint has of the run.

        All ranks come here at their first use of what was set up. Before that nothing can be loaded.
        """
        if self._has_begun:
            return
        if not self._setups:
            if self._resume and self.run_dir is not None:
                raise RequestError(
                    f"{asked} is that of the checkpoint in {self.run_dir}, which is loaded into what is set up; ask for it after "
                    "run.setup(...)"
                )
            return
        self._has_begun = True
        if not self._was_loaded:
            # By replica, not by rank: the ranks that share a replica must draw alike.
            seed_process(self.seed, rank=self._replica()[0])
        checkpoints = self._open_checkpoints()
        if checkpoints is not None and not self._was_loaded:
            if self._resume:
                self.load()
            elif not checkpoints.is_empty:
                raise RequestError(
                    f"{self.run_dir} holds the checkpoints of a run; call run.load() or pass resume=True to go on, or use "
                    "another run_dir"
                )
        engine, source = self._setups[0].engine, self._loaders[0].source
        self._reporter.started(str(self.plan), step=self._num_steps, engine=engine, source=source)
        self._reporter.clock.restart_for(self._num_steps + 1)

    @property
    def _num_steps(self) -> int:
        return self._setups[0].num_updates if self._setups else 0

    @property
    def _tokens_per_sample(self) -> int:
        return self._loaders[0].splits.spec.tokens_per_sample if self._loaders else 1

    @property
    def loaders(self) -> tuple[RunLoader, ...]:
        """In the order in which they were made."""
        return tuple(self._loaders)

    @contextmanager
    def searching(self, model: nn.Module | None = None) -> Iterator[tuple[Sequence[ModelSetup], ModelSetup]]:
        """Inside, updates are tried and taken back: they are neither counted nor reported. Gives all setups, and the model's."""
        self._begin()
        own = self._of(model)
        self._is_searching, passes, own.passes_at_update = True, own.passes_at_update, -1
        try:
            yield tuple(self._setups), own
        finally:
            self._is_searching, own.passes_at_update = False, passes

    def _of(self, model: nn.Module | None) -> ModelSetup:
        """The setup of a model; of the only one where none is named."""
        if model is None and len(self._setups) == 1:
            return self._setups[0]
        for one in self._setups:
            if one.engine.model is model:
                return one
        if not self._setups:
            raise RequestError("no model is set up yet; call run.setup(model, optimizer, loss=...) first")
        which = "none was named" if model is None else f"this {type(model).__name__} is none of them"
        raise RequestError(f"{len(self._setups)} models are set up, and {which}; name one with model=")

    def save(self, *, wait: bool = False) -> None:
        """Begin to write a checkpoint of all that was set up, and go on at once; it counts when every rank has voted for it.

        All ranks call it together, between two steps.

        Args:
            wait: return only when it is written, or has failed.

        Raises:
            RequestError: the run has no run directory, or nothing is set up.
        """
        if not self._setups:
            raise RequestError("run.save() has nothing to save yet; call it after run.setup(...)")
        self._begin()
        if self._checkpoints is None:
            raise RequestError(
                "run.save() needs a place: give shoal.Run a run_dir, or start the script with `shoal run`"
            )
        self._meet("run.save()")
        self._reporter.enter("checkpoint", self._num_steps)
        if self._checkpoints.save(self._num_steps, merge_states(self._setups, to_save=True), self._values()):
            for own in self._setups:
                for hook in own.engine.hooks:
                    hook.on_save(own.num_updates)
        if wait:
            self._reporter.enter("wait: checkpoint", self._num_steps)
            self._checkpoints.wait()
        self._leave()

    def _meet(self, call: str) -> None:
        """Wait for all ranks in a call that they make together: a save would find out at its vote only, with training far ahead.

        Raises:
            RunError: another rank does something else, or does not come; the supervisor names both.
        """
        self._reporter.enter(f"wait: {call}", self._num_steps)
        # As long as nothing else that ranks add up, so that another rank's sum cannot be taken for this one.
        told = torch.full((_MEETING,), self._num_steps, dtype=torch.int64, device=self.device)
        ranks = self._setups[0].engine.mesh.everyone
        if int(ranks.all_reduce_(told)[0]) != ranks.size * self._num_steps:
            raise RunError(
                f"rank {self.rank} is in {call} after step {self._num_steps}, and another after another step: all ranks call "
                "it together; look for a condition in the script that differs from rank to rank"
            )

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Record numbers in the events of the run, under the newest step: ``run.log(loss=loss)``, or a dict of them.

        Raises:
            RequestError: one of them is no number.
        """
        numbers = {}
        if values is not None and not isinstance(values, Mapping):
            raise RequestError(f"run.log takes names with numbers, and was given {values!r}; write run.log(loss=loss)")
        for name, value in {**(values or {}), **named}.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise RequestError(
                    f"run.log({name}=...) was given {describe_value(value)}; log one number, such as float(tensor.mean())"
                ) from None
        self._reporter.event(Logged(step=self._num_steps, values=numbers))

    def _heed(self, own: ModelSetup) -> None:
        """Do what hooks asked for; what they want saved is saved between two steps, when schedulers were stepped too."""
        requests = own.engine.requests
        self._wants_save = requests.take_save() or self._wants_save
        if self._checkpoints is not None:
            self._checkpoints.keep(frozenset().union(*(one.engine.requests.kept for one in self._setups)))
        for message in requests.take_messages():
            self._reporter.tell(message)

    def _between(self) -> None:
        """Between two steps: save what a hook wanted saved, or what ``checkpoint.every`` asks for."""
        every, step = self._keep.every, self._num_steps
        is_due = every > 0 and step % every == 0 and step > self._last_looked
        self._last_looked = step
        if (self._wants_save or is_due) and self._checkpoints is not None:
            self.save()
        self._wants_save = False

    def load(self) -> int | None:
        """Go on from the newest whole checkpoint in ``run_dir``: its step, or None where there is none. After ``setup``.

        Raises:
            RequestError: nothing is set up yet.
            RunError: it does not fit what was set up. All ranks raise together.
        """
        if not self._setups:
            raise RequestError("run.load() loads into what is set up; call it after run.setup(...)")
        checkpoints = self._open_checkpoints()
        if checkpoints is not None:
            checkpoints.wait()  # What was saved a moment ago is the newest.
        first = self._setups[0].engine
        path = None
        if checkpoints is not None:
            # Of islands and of compressed sums, which are one model's, the checkpoint says whether it is of theirs.
            named = first.state_to_load if len(self._setups) == 1 else None
            path = checkpoints.restore(merge_states(self._setups), self._take_values, named=named)
        if path is None:
            self._reporter.tell("there is no checkpoint to go on from; starting at step 0")
            return None
        for own in self._setups:
            own.engine.reduction.publish()
        if len(self._setups) == 1 and (said := first.restored()) is not None:
            self._reporter.tell(said)
        self._was_loaded, self._last_looked = True, self._num_steps
        self._reporter.tell(f"going on from step {self._num_steps}, {path}")
        return self._num_steps

    def state_dict(self, *, whole: bool = True, model: nn.Module | None = None) -> dict[str, Any]:
        """The weights by name: those of the whole model, put together from all ranks, or this rank's part of them.

        Args:
            whole: True for whole tensors on the CPU of every rank, which the plain module's ``load_state_dict`` takes; all ranks
                call it together. False for what this rank holds: live tensors, each with its placement.
            model: which one, where several are set up.
        """
        self._begin()
        engine = self._of(model).engine
        if whole:
            self._reporter.enter("wait: run.state_dict(whole=True)", self._num_steps)
        found: dict[str, Any] | None = engine.state_dict(everywhere=True) if whole else engine.state_dict(whole=False)
        self._leave()
        assert found is not None, "every rank gets them"
        return found

    def export(
        self,
        path: str | Path,
        *,
        format: str = "safetensors",
        plain: nn.Module | Callable[[], nn.Module] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Write the model for other programs, from any plan: the first rank writes the whole weights into a new folder.

        What is written is loaded back and run on the same inputs; an export that gives something else is refused, and nothing is
        left of it. All ranks call it together.

        Args:
            path: of the folder to make.
            format: safetensors (weights alone), hf (a folder for ``from_pretrained``), torch-export, or onnx.
            plain: a module as the model was before ``run.setup``, or a function that makes one, which the first rank alone calls:
                it gets the weights and is written. Not needed for weights alone, nor for a model of transformers.
            model: which one, where several are set up.

        Raises:
            RequestError: it cannot be written so; says what to give.
            RunError: the export differs from the model, or the disk refused. All ranks raise together.
        """
        own = self._of(model)
        folder, build = check_export(own.engine.model, path, format=format, plain=plain)
        self._begin()
        self._meet("run.export()")
        weights = own.engine.state_dict()
        failure: Exception | None = None
        if weights is not None:
            try:
                if build is None:
                    weights = {
                        name: weights[name] for name in own.engine.outline
                    }  # A weight that is tied once, as in checkpoints.
                facts = {"step": own.num_updates, "plan": str(own.engine.plan)}
                inputs = example_of(own.data).map(own.engine.precision.cast_input)
                self._reporter.tell(write_export(weights, folder, build, inputs, format=format, facts=facts))
            except (
                Exception
            ) as error:  # The module and its forward pass are the script's own, and the others wait to hear of it.
                failure = error
        problem = "" if failure is None else str(failure) or type(failure).__name__
        said = agree_on_failure(self.world, problem, where=folder)
        self._leave()
        if said:
            raise failure or RunError(f"run.export() failed on the first rank, which says why: {said}")

    def _open_checkpoints(self) -> RunCheckpoints | None:
        if self._checkpoints is None and self.run_dir is not None:
            self._checkpoints = RunCheckpoints(
                self.run_dir,
                config=self._keep,
                world=self.world,
                reporter=self._reporter,
                plan=str(self.plan),
                replica=self._replica()[0],
                seed=self.seed,
            )
        return self._checkpoints

    def _count(self, batch: StepBatch) -> None:
        """The run has trained on a batch. All ranks call it together."""
        for loader in self._loaders:
            loader.count(batch, self._reporter.event)

    def _values(self) -> dict[str, Any]:
        """What a checkpoint keeps of this run beside tensors."""
        return {
            "setups": [export_setup(own) for own in self._setups],
            "loaders": [loader.state_to_save() for loader in self._loaders],
            "first_loss": self._first_loss,
            "samples": self._samples,
        }

    def _take_values(self, kept: dict[str, Any]) -> None:
        theirs, ours = (len(kept["setups"]), len(kept["loaders"])), (len(self._setups), len(self._loaders))
        if theirs != ours:
            raise RunError(
                f"it has {theirs[0]} models and {theirs[1]} loaders, and this run has {ours[0]} and {ours[1]}; set up what the "
                "run that saved it did, before it is loaded"
            )
        for own, values in zip(self._setups, kept["setups"], strict=True):
            import_setup(own, values)
        for loader, position in zip(self._loaders, kept["loaders"], strict=True):
            loader.load_state_dict(position)
        self._first_loss, self._samples = kept["first_loss"], kept["samples"]

    def _let_go(self, *, has_failed: bool = False) -> None:
        """Threads, files and the signal, whatever else is broken."""
        for loader in self._loaders:
            loader.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._reporter.close(has_failed=has_failed)
        self._is_closed = True
        IS_RUNNING.clear()
        OPEN.clear()
        if self._former_handler is not None:
            signal.signal(signal.SIGTERM, self._former_handler)

    def _summarise(self) -> dict[str, Any]:
        """What ``summary.json`` says of the run. All ranks call it together."""
        peak = torch.tensor([peak_rss_bytes()], dtype=torch.int64, device=self.device)
        seconds = time.monotonic() - self._started
        found, first = self._evaluated, self._setups[0]
        samples_per_s = self._samples / seconds if seconds > 0 else 0.0
        return {
            "status": self.status,
            "stopped_by": self.stop.agreed,
            "steps": self._num_steps,
            "first_loss": self._first_loss,
            "final_loss": first.last_loss,
            "validation_loss": None if found is None else found.loss,
            "validation_accuracy": None if found is None else found.accuracy,
            "baseline_loss": None,
            "tokens_per_s": samples_per_s * self._tokens_per_sample,
            "samples_per_s": samples_per_s,
            "wall_s": seconds,
            "world_size": self.world_size,
            "plan": str(self.plan),
            "peak_rss_bytes": [int(one) for one in self.world.all_gather(peak)],
            "weights_sha256": first.engine.hash_weights(),
            "weights_of_models": {own.label: own.engine.hash_weights() for own in self._setups[1:]},
            **summarise_exchange(first.engine, self.world),
            "checkpoint_error": None if self._checkpoints is None else self._checkpoints.failure,
        }
