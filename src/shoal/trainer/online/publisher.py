"""Publishes the model of a run while it trains, where it is no worse than the last one that was published.

All ranks come to it after every step and put the whole weights together where a refresh is due; the first rank judges and writes.
A disk that refuses costs the refresh and not the run.
"""

import hashlib
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from shoal.checkpoint.pieces import as_blob
from shoal.checkpoint.published.version import InputField, Version
from shoal.checkpoint.published.versions import clear_drafts, publish, read_newest
from shoal.comm.world import World
from shoal.core.errors import RequestError
from shoal.core.events import DriftMeasured, Event, Published, RefreshRefused
from shoal.core.rundir import RunDir
from shoal.data.batchform import Branch, Leaf, ModelInputs, flat_targets
from shoal.data.fitted import FOLDER
from shoal.data.rawrows import read_preparation
from shoal.data.source import Items, SampleIds, Source, Splits
from shoal.data.spec import DataSpec
from shoal.engine.model import ParallelModel
from shoal.engine.reporting import Reporter
from shoal.engine.state import hash_weights_of
from shoal.trainer.online.config import PublishConfig
from shoal.trainer.online.gate import Decision, judge
from shoal.trainer.online.watch import DriftWatch
from shoal.trainer.progress import Progress


class NewestRows:
    """The last samples of a split, as a split of their own."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, min(count, len(source))
        self._first = len(source) - self._count

    def __len__(self) -> int:
        """Number of samples."""
        return self._count

    @property
    def uniform_weight(self) -> int | None:
        """See ``Source``."""
        return self._source.uniform_weight

    def collate(self, ids: SampleIds) -> Items:
        """See ``Source``."""
        return self._source.collate(np.asarray(ids, dtype=np.int64) + self._first)


class Publisher:
    """What a run publishes. All ranks make it together, and call ``after_step`` after every step.

    Args:
        config: of the recipe.
        run_dir: of the run.
        engine: the model.
        world: the ranks.
        data: all splits.
        taken: what the model takes, by ``describe_inputs`` before a plan laid it out.
        batch: samples per forward pass of an evaluation.
        reporter: told of what happens.
        watch: measures drift.
    """

    def __init__(
        self,
        config: PublishConfig,
        *,
        run_dir: Path,
        engine: ParallelModel,
        world: World,
        data: Splits,
        taken: tuple[tuple[InputField, ...], bool],
        batch: int,
        reporter: Reporter,
        watch: DriftWatch,
    ) -> None:
        self._config, self._engine, self._world, self._batch, self._watch = config, engine, world, batch, watch
        self._reporter, self._spec = reporter, data.spec
        self._root, self._recipe = RunDir(run_dir).published, RunDir(run_dir).recipe
        self._prepared = run_dir / FOLDER
        self._held_back = NewestRows(data.validation, config.holdback)
        self._inputs, self._is_keyed = taken
        self._next = time.monotonic() + 60 * (config.every_minutes or 0)
        self._last: float | None = None
        self._window = ""
        self._counts: dict[str, object] = {"published": 0, "refused": 0}
        if world.is_first:
            clear_drafts(self._root)
            self._window = hash_window(self._held_back)
            newest = read_newest(self._root)
            self._last = newest.loss if newest is not None and newest.window == self._window else None

    @property
    def every(self) -> int:
        """Steps between refreshes; 0 where the clock decides."""
        return self._config.every_steps or 0

    def after_step(self, progress: Progress) -> None:
        """Publish where it is time. All ranks call it together."""
        if self._is_due(progress.step):
            self._refresh(progress)

    def summary(self) -> dict[str, object]:
        """What was published and refused since this start, and the newest drift, as the first rank has it."""
        return dict(self._counts)

    def _count(self, what: str) -> None:
        number = self._counts[what]
        assert isinstance(number, int)
        self._counts[what] = number + 1

    def _is_due(self, step: int) -> bool:
        if self._config.every_steps is not None:
            return step % self._config.every_steps == 0
        is_late = self._world.is_first and time.monotonic() >= self._next
        if not self._agree(is_late):
            return False
        self._next = time.monotonic() + 60 * (self._config.every_minutes or 0)
        return True

    def _agree(self, said: bool) -> bool:
        """What the first rank says, on all."""
        told = torch.tensor([int(said and self._world.is_first)], dtype=torch.int64, device=self._world.device)
        return bool(self._world.all_reduce_(told).item())

    def _refresh(self, progress: Progress) -> None:
        started, step = time.perf_counter(), progress.step
        self._reporter.enter("publish", step)
        found = self._engine.evaluate(self._held_back, split="holdback", batch=self._batch, step=step)
        self._tell_drift(step)
        decision = judge(found.loss, self._last, self._config.bound)
        if not self._agree(decision.is_good):
            self._refuse(step, found.loss, decision)
            return
        weights = {}
        for name, tensor in self._engine.whole_weights():
            if self._world.is_first:
                weights[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if not self._world.is_first:
            return
        version = Version(
            number=0,
            step=step,
            weights_sha256=hash_weights_of(weights.items()),
            data_version=progress.position.version,
            loss=found.loss,
            window=self._window,
            window_samples=len(self._held_back),
            published=time.time(),
            spec=asdict(self._spec),
            inputs=self._inputs,
            is_keyed=self._is_keyed,
        )
        blobs = {name: as_blob(tensor) for name, tensor in weights.items()}
        try:
            recipe, beside = self._recipe.read_bytes(), read_preparation(self._prepared)
            version = publish(self._root, version, blobs, recipe, keep=self._config.keep, beside=beside)
        except OSError as error:
            self._refuse(
                step, found.loss, Decision(is_good=False, limit=decision.limit, reason=f"the disk refused: {error}")
            )
            return
        self._count("published")
        self._say(
            Published(
                step=step,
                version=version.number,
                loss=found.loss,
                last_loss=self._last,
                weights_sha256=version.weights_sha256,
                data_version=version.data_version,
                seconds=time.perf_counter() - started,
            )
        )
        self._last = found.loss
        self._watch.losses.mark()

    def _refuse(self, step: int, loss: float, decision: Decision) -> None:
        if not self._world.is_first:
            return
        self._count("refused")
        event = RefreshRefused(step=step, loss=loss, last_loss=self._last, limit=decision.limit, reason=decision.reason)
        self._say(event)
        self._reporter.warn(
            f"step {step}: the model was not published: {decision.reason}; the version before stays the newest"
        )

    def _tell_drift(self, step: int) -> None:
        measured = self._watch.measure() if self._world.is_first else None
        if measured is None:
            return
        index, where = measured
        shift = self._watch.losses.shift()
        self._counts["drift"] = {"stability": index, "where": where, "loss_shift": shift}
        samples = self._watch.num_samples
        self._say(DriftMeasured(step=step, samples=samples, stability=index, where=where, loss_shift=shift))

    def _say(self, event: Event) -> None:
        self._reporter.event(event)
        self._reporter.flush()  # Others look at a version at once, and what is said of it must not go with a killed run.


def describe_inputs(
    model: torch.nn.Module, example: ModelInputs, spec: DataSpec
) -> tuple[tuple[InputField, ...], bool]:
    """What the model takes, for one sample, and whether it is called by the names of that.

    Raises:
        RequestError: its inputs are nested, so that nobody could be told how to give them.
    """
    bare = example.without_labels()
    names = bare.names(model)
    is_keyed = False
    if bare.form is not None:
        node = bare.form.inputs
        is_flat = isinstance(node, Branch) and all(isinstance(child, Leaf) for child in node.children)
        if not is_flat and not isinstance(node, Leaf):
            raise RequestError(
                "publish: the model's inputs are nested, and whoever asks for predictions gives a flat dict of tensors; let the "
                "dataset give a dict or a tuple of tensors"
            )
        is_keyed = isinstance(node, Branch) and node.kind is dict
    is_text = spec.kind in ("tokens", "pairs")
    return tuple(
        InputField(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape[1:]),
            below=spec.vocab if is_text and not tensor.is_floating_point() else None,
            is_sequence=is_text and tensor.dim() == 2,
        )
        for name, tensor in zip(names, bare, strict=True)
    ), is_keyed


def hash_window(source: NewestRows) -> str:
    """Names a held-back window by its samples."""
    found = hashlib.sha256()
    for start in range(0, len(source), 256):
        items = source.collate(range(start, min(start + 256, len(source))))
        for tensor in (*items.inputs, *flat_targets(items.targets)):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return found.hexdigest()
