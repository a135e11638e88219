"""Between a run and its checkpoints: what is saved, what is taken up again, and what becomes of the ones that are torn."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shoal.checkpoint.agreement import agree_on_failure
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.places.opening import open_storage
from shoal.checkpoint.places.storage import Brought, Storage
from shoal.checkpoint.reader import read, read_local
from shoal.checkpoint.retention import Fallback
from shoal.checkpoint.saver import Saver, open_saver, warn_if_short
from shoal.checkpoint.whole import committed_names
from shoal.comm.world import World
from shoal.core.errors import AgreedError, RequestError, RunError, ShoalError
from shoal.core.events import CheckpointFailed, CheckpointRefused, Event, ReaderSlow
from shoal.core.rundir import RunDir
from shoal.data.fingerprint import Fingerprint
from shoal.data.order import Position
from shoal.data.source import Source
from shoal.data.streams.shards import gather_position
from shoal.engine.batches.receipt import ReceiptCounter
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
    path: str


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
        self._storage: Storage | None = None
        self._run_dir = run_dir
        if self.root is not None and run_dir is not None:
            check_inside(RunDir(run_dir))
            self._place = _identity(run_dir)
            opened = open_storage(self.root, world=world, config=config)
            reporter.tell(*filter(None, [opened.said]))
            self._storage = opened.storage
            self.saver = open_saver(
                self.root,
                world=world,
                config=config,
                plan=plan,
                report=self._report,
                settle=reporter.flush,
                storage=opened.storage,
            )

    def open_receipt(self, source: Source, each_step: Callable[[], bool]) -> ReceiptCounter:
        """What counts the samples of an epoch, of which checkpoints keep the sum so far."""
        return ReceiptCounter(
            source,
            world=self.world,
            replica=self.replica,
            seed=self.seed,
            each_step=each_step,
            report=self._report_receipt,
        )

    def _report_receipt(self, event: Event) -> None:
        self.reporter.event(event)
        if isinstance(event, ReaderSlow):
            self.reporter.warn(
                f"rank {event.slow_rank} took {event.load_seconds:.2f} s to load {event.steps} steps of {event.source}, the "
                f"others {event.usual_seconds:.2f} s: they wait for it; look at its disk, its link and its processors"
            )
        self.reporter.flush()  # There is one in an epoch, and a rank that is killed next must not take it along.

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
        if self.root is None or not self.world.is_first or self.config.address is not None:
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

    def refuse_checkpoints(self) -> None:
        """Make sure that no run has been here before. All ranks call it together.

        Raises:
            RequestError: one has; all ranks raise.
        """
        if self._storage is not None and not self._storage.is_empty:
            where = self._run_dir if self.config.address is None else self.config.address
            raise RequestError(
                f"{where} holds the checkpoints of a run; pass resume=True to go on, or use another run_dir"
            )

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
        progress = replace(progress, position=gather_position(progress.position, self.world))
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
        if self._storage is None or self.saver is None:
            return "last good checkpoint: none"
        self.saver.settle()
        done = Fallback(good=None, newest=None)
        storage, problem = self._storage, None
        try:
            if self.world.is_first:
                done = storage.fall_back(self.saver.proven.good)
        except OSError as error:
            problem = error
        # What the first rank found, for all: the rank that fails first ends the others.
        good, newest, first, last = self._tell(done.good, done.newest, done.first_aside, done.last_aside)
        try:
            if not self.world.is_first:
                storage.follow_back(good)
        except OSError as error:
            problem = error
        if problem is not None:
            self.reporter.warn(f"cannot set checkpoints aside in {storage.where}: {problem}")
        return Fallback(good=good, newest=newest, first_aside=first, last_aside=last).describe(storage.where)

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
        if self._storage is None or (step is not None and step < 0):
            return None
        brought = self._storage.bring(self.world, step)
        for name, reason in brought.refused if self.world.is_first else ():
            self.reporter.event(CheckpointRefused(path=f"{self._storage.where}/{name}", reason=reason))
            self.reporter.warn(f"checkpoint {name} is not whole and is passed over: {reason}")
        if brought.path is None:
            if brought.only_aside:
                raise AgreedError(brought.only_aside)
            return None
        try:
            return self._load_together(self._storage, brought, state_at, named)
        finally:
            self._storage.give_back(brought)

    def _load_together(
        self,
        storage: Storage,
        brought: Brought,
        state_at: Callable[[Progress], RankState],
        named: Callable[[RankState, Collection[str]], RankState],
    ) -> Restored | None:
        """Load what was brought; when a rank cannot, no rank goes on."""
        good = storage.newest_good(brought.step) if self.world.is_first else None
        (good,) = self._tell(good)
        restored, problem = None, ""
        refusal: type[ShoalError] = RunError
        try:
            restored = self._load(brought, state_at, named)
            if self.saver is not None:
                self.saver.proven.begin(restored.progress.step, good=good)
        except AgreedError as error:
            problem, refusal = f"cannot go on from {brought.name}: {error}", AgreedError
        except (OSError, ShoalError) as error:
            problem = f"rank {self.world.rank} cannot go on from {brought.name}: {error}"
        if said := agree_on_failure(self.world, problem, where=brought.name):
            raise refusal(said)
        return restored

    def newest(self) -> int | None:
        """The step of the newest checkpoint by name, as the first rank sees it. All ranks call it together."""
        root = self.root
        names = committed_names(root) if root is not None and self.world.is_first else []
        return self._tell(names[0][0] if names else None)[0]

    def go_on(self, step: int) -> None:
        """The run goes on from a state in memory, after so many steps. All ranks call it together."""
        newest = self.newest()
        if self.saver is None or self.root is None or newest is None:
            return
        (good,) = self._tell(self._storage.newest_good(newest) if self._storage and self.world.is_first else None)
        self.saver.proven.begin(newest, good=good)
        self.saver.take(step)
        self.saved_step = newest if newest == step else -1

    def abandon(self) -> None:
        """Forget a save that is under way: its ranks are not together any more, and their vote fails."""
        self.saver = None

    def _tell(self, *steps: int | None) -> list[int | None]:
        """What the first rank says, to all."""
        told = [0 if step is None or not self.world.is_first else 1 + step for step in steps]
        heard = self.world.all_reduce_(torch.tensor(told, dtype=torch.int64, device=self.world.device)).tolist()
        return [None if number == 0 else number - 1 for number in heard]

    def _load(
        self,
        brought: Brought,
        state_at: Callable[[Progress], RankState],
        named: Callable[[RankState, Collection[str]], RankState],
    ) -> Restored:
        path, manifest = brought.path, brought.manifest
        assert path is not None, "nothing is loaded where nothing was brought"
        prefix = f"rng/rank-{self.world.rank:03d}/"
        checkpoint = read(path, wanted=lambda name: name.startswith(prefix), expect=manifest)
        progress = Progress.from_values(checkpoint.values.get("progress"), origin=brought.name)
        if progress.step != checkpoint.step:
            raise RunError(f"its progress is of step {progress.step}, its manifest of step {checkpoint.step}")
        warning = refuse_other_data(checkpoint.values, self.data, accepted=self.config.other_data)
        if warning is not None:
            self.reporter.warn(warning)
            if progress.position.offset >= self.data.splits["train"].samples:
                progress = replace(progress, position=Position(epoch=progress.position.epoch + 1))
        state = without_missing(state_at(progress), checkpoint.manifest.tensors)
        refuse_other_state(state, checkpoint.manifest.tensors, origin=brought.name)
        state = named(state, checkpoint.manifest.tensors)
        load_rank_state(state, read_local(path, state.placements, expect=manifest), origin=brought.name)
        # Under another plan a rank's number means another replica, and the ranks that share one must draw alike.
        is_same_plan = checkpoint.manifest.plan == self.plan
        if not (is_same_plan and import_random_state(checkpoint.tensors, self.world.rank)):
            seed_process(self.seed + checkpoint.step, rank=self.replica)
        self.saved_step = progress.step
        return Restored(progress=progress, path=brought.name)


def _identity(path: Path) -> tuple[int, int] | None:
    """By which a folder is known, whatever its name is; None when there is none of this name."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
