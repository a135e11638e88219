"""Between a run and its checkpoints: what is saved, what is taken up again, and what becomes of the ones that are torn."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.layout import parse_step, step_name
from shoal.checkpoint.reader import read, read_local
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.space import warn_if_short
from shoal.checkpoint.sweep import sweep
from shoal.checkpoint.whole import committed_names, newest_whole
from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.core.events import CheckpointFailed, CheckpointRefused, Event
from shoal.core.rundir import RunDir
from shoal.data.fingerprint import Fingerprint
from shoal.data.order import Position
from shoal.trainer.reporting import Reporter
from shoal.trainer.rng import export_random_state, import_random_state, seed_process
from shoal.trainer.samedata import data_values, refuse_other_data
from shoal.trainer.state import Held, Progress, import_held, refuse_other_state


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gave back."""

    progress: Progress
    path: Path


class Persistence:
    """Saves and restores one run. Without a run directory there is nothing to save to and every call does nothing."""

    def __init__(
        self,
        run_dir: Path | None,
        *,
        config: CheckpointConfig,
        world: World,
        reporter: Reporter,
        plan: str,
        replica: int,
        seed: int,
        data: Fingerprint,
    ) -> None:
        self.config = config
        self.world = world
        self.reporter = reporter
        self.plan = plan
        self.replica = replica
        self.seed = seed
        self.data = data
        self.root = RunDir(run_dir).checkpoints if run_dir is not None else None
        self.saved_step = -1
        self.failure: str | None = None
        self.saver: Saver | None = None
        if self.root is not None:
            if world.is_first and self.root.is_dir():
                sweep(self.root)
            world.barrier()
            self.saver = Saver(
                self.root,
                rank=world.rank,
                world_size=world.size,
                group=world.save_group,
                config=config,
                plan=plan,
                deadline_s=world.deadline_seconds,
                report=self._report,
                settle=reporter.flush,
            )

    def _report(self, event: Event) -> None:
        self.reporter.event(event)
        if isinstance(event, CheckpointFailed):
            self.failure = event.reason
            self.saved_step = -1  # so that a last save at this very step tries again
            self.reporter.warn(f"checkpoint at step {event.step} was not saved: {event.reason}; training goes on")
        else:
            self.failure = None

    def warn_if_disk_is_short(self, held: Held, *, num_parts: int = 1) -> None:
        """Say before the first step that the disk cannot hold the checkpoints that the recipe keeps.

        A pipeline rank holds one of ``num_parts`` parts of the model, which are taken to be of one size.
        """
        if self.root is None or not self.world.is_first:
            return
        num_bytes = sum(
            math.prod(held.placements[name].whole_shape) * tensor.element_size()
            for name, tensor in held.tensors.items()
        )
        num_bytes *= num_parts
        copies = self.config.keep + 1 if self.config.every else 1
        message = warn_if_short(self.root.parent, num_bytes * copies)
        if message is not None:
            self.reporter.warn(message)

    def has_checkpoints(self) -> bool:
        """True when a run has been here before."""
        return self.root is not None and bool(committed_names(self.root))

    @property
    def every(self) -> int:
        """Steps between checkpoints; 0 for none."""
        return self.config.every if self.saver is not None else 0

    def is_due(self, step: int) -> bool:
        """True when the recipe wants a checkpoint after this step."""
        return self.every > 0 and step % self.every == 0

    def save(self, held: Held, progress: Progress) -> None:
        """Copy the state and begin to write it; returns as soon as the copy is made."""
        if self.saver is None or progress.step == self.saved_step:
            return
        self.saved_step = progress.step
        self.saver.save(
            progress.step,
            held.tensors,
            {"progress": progress.as_values(), **data_values(self.data)},
            export_random_state(self.world.rank),
            placements=held.placements,
        )

    def wait(self) -> None:
        """Wait until what was begun is committed or has failed, on every rank."""
        if self.saver is not None:
            self.saver.wait()

    def last_path(self) -> Path | None:
        """The newest whole checkpoint, for messages that name what can be gone back to."""
        return newest_whole(self.root).path if self.root is not None else None

    def close(self) -> None:
        """Stop the writer."""
        if self.saver is not None:
            self.saver.close()

    def restore(self, held_at: Callable[[Progress], Held]) -> Restored | None:
        """Load the newest whole checkpoint; None when there is none to load. Refused ones are named.

        The first rank chooses and all read that one: if each chose, a disk that fails one of them would set ranks to work on
        different weights.

        Args:
            held_at: what this rank holds of a run that is so far, to be written to.

        Raises:
            RunError: a rank cannot read it, or it does not fit this model or this data. All ranks raise together.
        """
        if self.root is None:
            return None
        chosen = self._choose(self.root) if self.world.is_first else 0
        step = int(self.world.sum_(torch.tensor([chosen], device=self.world.device))) - 1
        if step < 0:
            return None
        path = self.root / step_name(step)
        restored, problem = None, ""
        try:
            restored = self._load(path, held_at)
        except (OSError, RunError) as error:
            problem = f"rank {self.world.rank} cannot go on from {path}: {error}"
        failures = int(self.world.sum_(torch.tensor([int(bool(problem))], device=self.world.device)))
        if failures:
            raise RunError(problem or f"{failures} other rank(s) cannot go on from {path}")
        return restored

    def _choose(self, root: Path) -> int:
        """The step of the newest whole checkpoint plus one; 0 when there is none."""
        found = newest_whole(root)
        for path, reason in found.refused:
            self.reporter.event(CheckpointRefused(path=str(path), reason=reason))
            self.reporter.warn(f"checkpoint {path.name} is not whole and is passed over: {reason}")
        step = parse_step(found.path.name) if found.path is not None else None
        return 0 if step is None else step + 1

    def _load(self, path: Path, held_at: Callable[[Progress], Held]) -> Restored:
        prefix = f"rng/rank-{self.world.rank:03d}/"
        checkpoint = read(path, wanted=lambda name: name.startswith(prefix))
        progress = Progress.from_values(checkpoint.values.get("progress"), origin=str(path))
        if progress.step != checkpoint.step:
            raise RunError(f"its progress is of step {progress.step}, its manifest of step {checkpoint.step}")
        remark = refuse_other_data(checkpoint.values, self.data, accepted=self.config.other_data)
        if remark is not None:
            self.reporter.warn(remark)
            if progress.position.offset >= self.data.splits["train"].samples:
                progress = replace(progress, position=Position(epoch=progress.position.epoch + 1))
        held = held_at(progress)
        refuse_other_state(held, checkpoint.manifest.tensors, origin=str(path))
        import_held(held, read_local(path, held.placements), origin=str(path))
        # Under another plan a rank's number means another replica, and the ranks that share one must draw alike.
        is_same_plan = checkpoint.manifest.plan == self.plan
        if not (is_same_plan and import_random_state(checkpoint.tensors, self.world.rank)):
            seed_process(self.seed + checkpoint.step, rank=self.replica)
        self.saved_step = progress.step
        return Restored(progress=progress, path=path)
