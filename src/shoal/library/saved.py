"""What a script's own run keeps: its checkpoints, taken and loaded by all ranks together, and its summary."""

import time
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.config import CheckpointConfig
from shoal.core.errors import RequestError, RunError
from shoal.engine.evaluate import Evaluation
from shoal.engine.reporting import Reporter
from shoal.library.loader import RunLoader
from shoal.library.process import RunProcess
from shoal.library.saving import RunCheckpoints, export_setup, import_setup, merge_states
from shoal.library.setups import ModelSetup
from shoal.telemetry.memory import peak_rss_bytes


class SavedRun(RunProcess):
    """A run's process with what it has set up, as far as that is saved, loaded and told at the end."""

    run_dir: Path | None
    seed: int
    _reporter: Reporter
    _keep: CheckpointConfig
    _started: float

    def __init__(self) -> None:
        self._checkpoints: RunCheckpoints | None = None
        self._was_loaded = False
        self._wants_save = False
        self._setups: list[ModelSetup] = []
        self._loaders: list[RunLoader] = []
        self._first_loss: float | None = None
        self._evaluated: Evaluation | None = None
        self._samples = 0

    def _begin(self) -> None:
        """Called before progress is read or made."""
        raise NotImplementedError

    @property
    def _num_steps(self) -> int:
        return self._setups[0].num_updates if self._setups else 0

    @property
    def _tokens_per_sample(self) -> int:
        return self._loaders[0].splits.spec.tokens_per_sample if self._loaders else 1

    def save(self, *, wait: bool = False) -> None:
        """Begin to write a checkpoint of all that was set up, and go on at once; it counts when every rank has voted for it.

        All ranks call it together, between two steps.

        Args:
            wait: return only when it is written, or has failed.

        Raises:
            RequestError: the run has no run directory.
        """
        self._begin()
        if self._checkpoints is None:
            raise RequestError(
                "run.save() needs a place: give shoal.Run a run_dir, or start the script with `shoal run`"
            )
        self._reporter.enter("checkpoint", self._num_steps)
        if self._checkpoints.save(self._num_steps, merge_states(self._setups), self._values()):
            for own in self._setups:
                for hook in own.engine.hooks:
                    hook.on_save(own.num_updates)
        if wait:
            self._reporter.enter("wait: checkpoint", self._num_steps)
            self._checkpoints.wait()

    def _heed(self, own: ModelSetup) -> None:
        """Do what hooks asked for; what they want saved is saved between two steps, when schedulers were stepped too."""
        requests = own.engine.requests
        self._wants_save = requests.take_save() or self._wants_save
        if self._checkpoints is not None and own is self._setups[0]:
            self._checkpoints.keep(requests.kept)
        for message in requests.take_messages():
            self._reporter.tell(message)

    def _between(self) -> None:
        """Between two steps: save what a hook wanted saved."""
        if self._wants_save and self._checkpoints is not None:
            self.save()
        self._wants_save = False

    def load(self) -> int | None:
        """Go on from the newest whole checkpoint in ``run_dir``: its step, or None where there is none. After ``setup``.

        Raises:
            RunError: it does not fit what was set up. All ranks raise together.
        """
        checkpoints = self._open_checkpoints()
        path = None if checkpoints is None else checkpoints.restore(merge_states(self._setups), self._take_values)
        if path is None:
            self._reporter.tell("there is no checkpoint to go on from; starting at step 0")
            return None
        for own in self._setups:
            own.engine.reduction.publish()
        self._was_loaded = True
        self._reporter.tell(f"going on from step {self._num_steps}, {path}")
        return self._num_steps

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

    def _values(self) -> dict[str, Any]:
        """What a checkpoint keeps of this run beside tensors."""
        return {
            "setups": [export_setup(own) for own in self._setups],
            "loaders": [loader.state_dict() for loader in self._loaders],
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
            "checkpoint_error": None if self._checkpoints is None else self._checkpoints.failure,
        }
