"""Between a run and its checkpoints: what is saved, what is taken up again, and what becomes of the ones that are torn."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shoal.checkpoint.agreement import agree_on_checkpoint, agree_on_failure
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.files import parse_step, step_name
from shoal.checkpoint.reader import read, read_local
from shoal.checkpoint.retention import Fallback, fall_back, newest_good, refuse_only_aside
from shoal.checkpoint.saver import Saver, open_saver, warn_if_short
from shoal.checkpoint.whole import Found, committed_names, newest_whole, verify
from shoal.comm.world import World
from shoal.core.errors import AgreedError, RunError, ShoalError
from shoal.core.events import CheckpointFailed, CheckpointRefused, Event
from shoal.core.rundir import RunDir
from shoal.data.fingerprint import Fingerprint
from shoal.data.order import Position
from shoal.engine.hooks import without_missing
from shoal.engine.reporting import Reporter
from shoal.engine.state import (
    RankState,
    export_random_state,
    import_random_state,
    load_rank_state,
    refuse_other_state,
    seed_process,
)
from shoal.trainer.claim import check_inside
from shoal.trainer.progress import Progress
from shoal.trainer.samedata import data_values, refuse_other_data


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
        self._run_dir = run_dir
        if self.root is not None and run_dir is not None:
            check_inside(RunDir(run_dir))
            self._place = _identity(run_dir)
            self.saver = open_saver(
                self.root, world=world, config=config, plan=plan, report=self._report, settle=reporter.flush
            )

    def _report(self, event: Event) -> None:
        self.reporter.event(event)
        if isinstance(event, CheckpointFailed):
            self.failure = event.reason
            self.saved_step = -1  # so that a last save at this very step tries again
            self.reporter.warn(f"checkpoint at step {event.step} was not saved: {event.reason}; training goes on")
        else:
            self.failure = None

    def warn_if_disk_is_short(self, state: RankState, *, num_parts: int = 1) -> None:
        """Say before the first step that the disk cannot hold the checkpoints that the recipe keeps.

        A pipeline rank holds one of ``num_parts`` parts of the model, which are taken to be of one size.
        """
        if self.root is None or not self.world.is_first:
            return
        num_bytes = sum(
            math.prod(state.placements[name].whole_shape) * tensor.element_size()
            for name, tensor in state.tensors.items()
        )
        num_bytes *= num_parts
        # Those that are kept, the newest good one, and the one that is being written.
        copies = self.config.keep + 2 if self.config.every else 1
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

    def save(self, state: RankState, progress: Progress) -> bool:
        """Copy the state and begin to write it; returns as soon as the copy is made. False where there is nothing to write."""
        if self.saver is None:
            return False
        if progress.step == self.saved_step:
            self.saver.wait()  # It may be failing just now, of which ranks would hear at different times.
            if progress.step == self.saved_step:
                return False
        self._refuse_another_place()
        self.saved_step = progress.step
        self.saver.save(
            progress.step,
            state.tensors,
            {"progress": progress.as_values(), **data_values(self.data)},
            export_random_state(self.world.rank),
            placements=state.placements,
        )
        return True

    def _refuse_another_place(self) -> None:
        """Stop a run whose directory is not there any more: it would train to its end and leave nothing.

        Raises:
            RunError: names the directory.
        """
        if self._run_dir is not None and _identity(self._run_dir) != self._place:
            raise RunError(
                f"{self._run_dir} was removed while the run was under way: checkpoints and events have no place any more; "
                "start again, in a directory that stays"
            )

    def wait(self) -> None:
        """Wait until what was begun is committed or has failed, on every rank."""
        if self.saver is not None:
            self.saver.wait()

    def take(self, step: int) -> None:
        """Step number ``step`` was taken, so what was saved before it is good."""
        if self.saver is not None:
            self.saver.take(step)

    def keep(self, steps: Collection[int]) -> None:
        """Let the checkpoints of these steps not expire, in place of those that were named before."""
        if self.saver is not None:
            self.saver.kept = frozenset(steps)

    def settle(self) -> None:
        """Wait until what has expired is deleted."""
        if self.saver is not None:
            self.saver.settle()

    def fall_back(self) -> str:
        """Set aside what is newer than the newest good checkpoint, so that ``--resume`` begins there; what to say of it.

        All ranks call this together, when a step cannot be taken.
        """
        if self.root is None or self.saver is None:
            return "last good checkpoint: none"
        self.saver.settle()
        done = Fallback(good=None, newest=None)
        if self.world.is_first:
            try:
                done = fall_back(self.root, self.saver.proven.good)
            except OSError as error:
                self.reporter.warn(f"cannot set checkpoints aside in {self.root}: {error}")
        # What the first rank found, for all: the rank that fails first ends the others.
        good, newest, first, last = self._tell(done.good, done.newest, done.first_aside, done.last_aside)
        return Fallback(good=good, newest=newest, first_aside=first, last_aside=last).describe(self.root)

    def close(self) -> None:
        """Stop the writer."""
        if self.saver is not None:
            self.saver.close()

    def roll_back(
        self,
        state_at: Callable[[Progress], RankState],
        named: Callable[[RankState, Collection[str]], RankState],
    ) -> Restored | None:
        """Go back to the newest good checkpoint, as ``restore`` does; None when there is none."""
        self.fall_back()
        good = self.saver.proven.good if self.saver is not None else None
        return self.restore(state_at, named, step=-1 if good is None else good)

    def restore(
        self,
        state_at: Callable[[Progress], RankState],
        named: Callable[[RankState, Collection[str]], RankState] = lambda own, _: own,
        *,
        step: int | None = None,
    ) -> Restored | None:
        """Load the newest whole checkpoint; None when there is none to load. Refused ones are named.

        The first rank chooses, and all agree on that one's manifest before any of them loads: if each chose, or somebody
        replaced it meanwhile, ranks would be set to work on different weights.

        Args:
            state_at: this rank's state in a run that is so far, to be written to.
            named: gives that state the names that a checkpoint with such tensors has for it.
            step: load the checkpoint of this step and no other.

        Raises:
            AgreedError: it was trained on other data. All ranks raise together.
            RunError: a rank cannot read it, or it does not fit this model. All ranks raise together.
        """
        if self.root is None:
            return None
        path, manifest = agree_on_checkpoint(
            self.world, self.root, self._choose(self.root, step) if self.world.is_first else None
        )
        if path is None:
            if step is None:
                refuse_only_aside(self.root)
            return None
        good = newest_good(self.root, until=parse_step(path.name)) if self.world.is_first else None
        (good,) = self._tell(good)
        restored, problem = None, ""
        refusal: type[ShoalError] = RunError
        try:
            restored = self._load(path, manifest, state_at, named)
            if self.saver is not None:
                self.saver.proven.begin(restored.progress.step, good=good)
        except AgreedError as error:
            problem, refusal = f"cannot go on from {path}: {error}", AgreedError
        except (OSError, ShoalError) as error:
            problem = f"rank {self.world.rank} cannot go on from {path}: {error}"
        if said := agree_on_failure(self.world, problem, where=path):
            raise refusal(said)
        return restored

    def _tell(self, *steps: int | None) -> list[int | None]:
        """What the first rank says, to all."""
        told = [0 if step is None or not self.world.is_first else 1 + step for step in steps]
        heard = self.world.all_reduce_(torch.tensor(told, dtype=torch.int64, device=self.world.device)).tolist()
        return [None if number == 0 else number - 1 for number in heard]

    def _choose(self, root: Path, step: int | None) -> Path | None:
        """The newest whole checkpoint, or that of this step; None when there is none."""
        if step is not None and step < 0:
            return None
        if step is None:
            found = newest_whole(root)
        else:
            path = root / step_name(step)
            problems = verify(path) if path.is_dir() else ["it is gone"]
            found = Found(path=None if problems else path, refused=((path, "; ".join(problems)),) if problems else ())
        for path, reason in found.refused:
            self.reporter.event(CheckpointRefused(path=str(path), reason=reason))
            self.reporter.warn(f"checkpoint {path.name} is not whole and is passed over: {reason}")
        return found.path

    def _load(
        self,
        path: Path,
        manifest: str,
        state_at: Callable[[Progress], RankState],
        named: Callable[[RankState, Collection[str]], RankState],
    ) -> Restored:
        prefix = f"rng/rank-{self.world.rank:03d}/"
        checkpoint = read(path, wanted=lambda name: name.startswith(prefix), expect=manifest)
        progress = Progress.from_values(checkpoint.values.get("progress"), origin=str(path))
        if progress.step != checkpoint.step:
            raise RunError(f"its progress is of step {progress.step}, its manifest of step {checkpoint.step}")
        warning = refuse_other_data(checkpoint.values, self.data, accepted=self.config.other_data)
        if warning is not None:
            self.reporter.warn(warning)
            if progress.position.offset >= self.data.splits["train"].samples:
                progress = replace(progress, position=Position(epoch=progress.position.epoch + 1))
        state = without_missing(state_at(progress), checkpoint.manifest.tensors)
        refuse_other_state(state, checkpoint.manifest.tensors, origin=str(path))
        state = named(state, checkpoint.manifest.tensors)
        load_rank_state(state, read_local(path, state.placements, expect=manifest), origin=str(path))
        # Under another plan a rank's number means another replica, and the ranks that share one must draw alike.
        is_same_plan = checkpoint.manifest.plan == self.plan
        if not (is_same_plan and import_random_state(checkpoint.tensors, self.world.rank)):
            seed_process(self.seed + checkpoint.step, rank=self.replica)
        self.saved_step = progress.step
        return Restored(progress=progress, path=path)


def _identity(path: Path) -> tuple[int, int] | None:
    """By which a folder is known, whatever its name is; None when there is none of this name."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
