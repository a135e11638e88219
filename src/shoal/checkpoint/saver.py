"""Saves while training goes on: the saver copies the state, returns, and lets one thread write, vote and commit.

torch's ``async_save`` does the same with pickled metadata, no sums and an error that stays on the rank it happened on; here any
rank's failure fails the save on all of them, each of them reports it, and the run goes on with the checkpoints it has.

Every wait ends: a save that is not committed within its deadline has failed, and ``wait`` and ``close`` stop waiting soon after.
"""

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.attempt import Agreement, Request, attempt
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.holdings import Cut, Listing, assign, cuts_of
from shoal.checkpoint.pieces import as_blob, dtype_name, list_holdings, view_cuts
from shoal.checkpoint.places.storage import OneFolder, Storage
from shoal.checkpoint.retention import Proven
from shoal.checkpoint.shard import num_bytes
from shoal.checkpoint.strictjson import pack, unpack
from shoal.checkpoint.vote import LostTouch, SaveFailed, Vote, Votes
from shoal.comm.world import World
from shoal.core.clock import Deadline
from shoal.core.events import CheckpointFailed, CheckpointSaved, Event, Warned
from shoal.core.placement import Placement, Shape
from shoal.core.units import format_bytes


class Copies:
    """Copies of the state, one buffer per tensor name, used again by every save; unchanged until the next save copies."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous CPU copies of ``tensors``; buffers of names that are no longer saved are given up."""
        buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        # Without autograd, and not one by one for each device: one wait at the end for all copies off an accelerator.
        with torch.no_grad():
            for name, tensor in tensors.items():
                buffers[name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._buffers = buffers
        return buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def warn_if_short(root: Path, num_bytes: int) -> str | None:
    """A warning when the disk under ``root`` has less free than ``num_bytes``; None when it has enough or cannot say.

    Args:
        root: the checkpoints folder; it need not exist yet.
        num_bytes: everything that will stand there at one time: what is kept and the one being written.
    """
    existing = next((path for path in (root.absolute(), *root.absolute().parents) if path.exists()), None)
    if existing is None:
        return None
    try:
        free = shutil.disk_usage(existing).free
    except OSError:
        return None
    already = _bytes_below(root)
    missing = num_bytes - already - free
    if missing <= 0:
        return None
    return (
        f"checkpoints in {root} need {format_bytes(num_bytes)} and the disk has {format_bytes(free + already)} for them; "
        f"free {format_bytes(missing)}, keep fewer (checkpoint.keep), or use another --run-dir"
    )


def _bytes_below(root: Path) -> int:
    """Bytes that older checkpoints hold: they expire as new ones come."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


Outcome = CheckpointSaved | CheckpointFailed

# After the deadline no vote waits any more; what is left is the removal of the draft.
_GRACE_SECONDS = 10.0


@dataclass
class _Job:
    request: Request
    stall_seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome | None = None


@dataclass
class _Settle:
    """What expired when another checkpoint became known to be good is to be deleted."""

    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What one rank copies for a save."""

    shared: Mapping[str, tuple[str, Shape]]
    views: Mapping[str, Tensor]
    """By key in the shard."""
    listing: Listing | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Which piece each of ``views`` is, when ranks hold pieces."""


class Saver:
    """Writes the checkpoints of one rank. All ranks call ``save`` at the same steps, with the same values."""

    def __init__(
        self,
        root: Path,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        config: CheckpointConfig,
        plan: str,
        deadline_s: float,
        report: Callable[[Event], None],
        vote: Votes | None = None,
        settle: Callable[[], None] | None = None,
        proven: Proven | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Make a saver; nothing is written or exchanged yet.

        Args:
            root: this rank's ``checkpoints`` folder.
            rank: this process.
            world_size: how many processes save together.
            group: a gloo group of all of them that nothing else uses, because a thread of its own votes on it; None when alone.
            config: what is kept, and whether writing happens in the background.
            plan: the plan's line, for the manifest.
            deadline_s: seconds after which an uncommitted save has failed.
            report: takes the events; called from the writing thread.
            vote: how the processes agree, where no group connects them; called from the writing thread.
            settle: writes what should be in files before a checkpoint counts; called from the writing thread before it votes.
            proven: what is known of earlier checkpoints of the run; left out, nothing.
            storage: where checkpoints are; left out, in ``root``, which all ranks see.
        """
        self._root = root
        self._vote: Votes = vote or Vote(group, rank=rank, world_size=world_size)
        self._storage: Storage = storage or OneFolder(root, rank=rank)
        self._config = config
        self._plan = plan
        self._deadline_s = deadline_s
        self._report = report
        self._settle = settle
        self._copies = Copies()
        self._agreement = Agreement()
        self._jobs: queue.SimpleQueue[_Job | _Settle | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._latest: _Job | None = None
        self.proven = proven or Proven()
        self.kept: frozenset[int] = frozenset()
        """Steps whose checkpoints do not expire; replaced, never changed, by the loop."""
        self._newest: int | None = None
        self._marked: int | None = None
        self._refusal: CheckpointFailed | None = None
        """Of the latest call of ``save``, when it was not even begun."""
        self._gave_up: CheckpointFailed | None = None
        """Set by ``wait``, on the loop's side, while the thread is still busy after its deadline."""
        self._lost_touch: str | None = None
        """Set by the thread, when the ranks can no longer vote."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        local: Mapping[str, Tensor] | None = None,
        placements: Mapping[str, Placement] | None = None,
    ) -> None:
        """Copy this rank's share and begin to write it. A save that is still being written is waited for first.

        Never raises because of the disk or of another rank: the outcome is an event, and what ``wait`` returns.

        Args:
            step: steps done; the checkpoint's name.
            tensors: what the ranks have in common; each rank writes its share of them.
            values: texts, numbers, lists and mappings, the same on every rank.
            local: tensors of this rank alone, under names that no other rank uses.
            placements: which part of its whole each of ``tensors`` is; one that is not named here is whole. With placements a
                tensor need not be on every rank, and what several ranks hold is written by one of them. Given on all ranks, if
                with nothing in it, or on none: without, every rank holds all of ``tensors`` alike and nothing is asked.
        """
        started = time.perf_counter()
        self._refusal = None
        self.wait()
        reason = self._gave_up.reason if self._gave_up is not None else self._lost_touch
        if reason is not None:
            self._refusal = CheckpointFailed(step=step, reason=f"{reason}; restart the run to save again")
            self._report(self._refusal)
            return
        request = self._request(step, tensors, values, local or {}, placements)
        self._latest = _Job(request=request, stall_seconds=time.perf_counter() - started)
        self._give(self._latest)
        if not self._config.background:
            self.wait()

    def take(self, step: int) -> None:
        """Say that step number ``step`` was taken: the checkpoints before it are good, of which the newest stays."""
        if self.proven.take(step) and self._storage.keeps:
            # In the thread, because deleting takes time.
            self._give(_Settle())

    def _give(self, job: _Job | _Settle) -> None:
        if self._thread is None or not self._thread.is_alive():
            # A daemon: a disk that never answers must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="shoal-saver", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def settle(self) -> None:
        """Wait until what has expired is deleted; a save that is being written is waited for as ``wait`` does."""
        self.wait()
        if self._thread is not None and self._thread.is_alive() and self._gave_up is None:
            last = _Settle()
            self._jobs.put(last)
            last.done.wait(self._deadline_s + _GRACE_SECONDS)

    def wait(self) -> Outcome | None:
        """Wait for the save that was begun last; its outcome, or None when there was none.

        A save that is still not over after its deadline counts as failed; should it end later, that is reported too.
        """
        job = self._latest
        if self._refusal is not None or job is None:
            return self._refusal
        # Patience runs out once: after that neither the loop nor the end of the run stands still for a disk that does not answer.
        if job.done.wait(0.0 if self._gave_up is not None else job.request.deadline.remaining + _GRACE_SECONDS):
            self._gave_up = None
            return job.outcome
        if self._gave_up is None:
            step = job.request.step
            reason = f"rank {self._vote.rank}: step {step} is still being written after {self._deadline_s:g} s"
            self._gave_up = CheckpointFailed(step=step, reason=reason)
            self._report(self._gave_up)
        return self._gave_up

    def close(self) -> None:
        """Wait for what was begun, then end the thread. May be called twice."""
        self.wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=1.0)
            self._thread = None

    def _request(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        local: Mapping[str, Tensor],
        placements: Mapping[str, Placement] | None,
    ) -> Request:
        """This rank's share, copied. What goes wrong here becomes this rank's no in the first vote: the others wait for it."""
        deadline = Deadline(seconds=self._deadline_s)
        try:
            share = self._whole_share(tensors) if placements is None else self._pieces(tensors, placements)
            if share.views.keys() & local.keys():
                raise ValueError(
                    f"{min(share.views.keys() & local.keys())!r} is both a local tensor and one of all ranks"
                )
            copies = self._copy({**share.views, **local})
            blobs = {name: as_blob(tensor) for name, tensor in copies.items() if name not in share.cuts}
            # A copy that the loop cannot change, and the proof that it can be written.
            plain = unpack(pack(values))
        # torch raises RuntimeError when there is no memory for the copy.
        except (RuntimeError, MemoryError, ValueError) as error:
            problem = f"cannot copy the state: {error}"
            return Request(
                step=step, plan=self._plan, values={}, blobs={}, shared={}, deadline=deadline, problem=problem
            )
        return Request(
            step=step,
            plan=self._plan,
            values=plain,
            blobs=blobs,
            shared=share.shared,
            deadline=deadline,
            listing=share.listing,
            copies={cut: copies[key] for key, cut in share.cuts.items()},
        )

    def _whole_share(self, tensors: Mapping[str, Tensor]) -> _Share:
        """This rank's part of tensors that all ranks hold alike: a pure function of their sizes."""
        shared = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
        owners = assign({name: num_bytes(*kind) for name, kind in shared.items()}, self._vote.world_size)
        mine = {name: tensor for name, tensor in tensors.items() if owners[name] == self._vote.rank}
        return _Share(shared=shared, views=mine)

    def _pieces(self, tensors: Mapping[str, Tensor], placements: Mapping[str, Placement]) -> _Share:
        """What this rank will write if it is still what was agreed; else all that it holds."""
        listing = list_holdings(tensors, placements)
        expected = self._agreement.expect(listing)
        views = view_cuts(tensors, placements, cuts_of(listing) if expected is None else expected)
        return _Share(
            shared={name: (held.dtype, held.shape) for name, held in listing.items()},
            views={cut.key: view for cut, view in views.items()},
            listing=listing,
            cuts={cut.key: cut for cut in views},
        )

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._config.background:
            return self._copies.take(tensors)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Settle):
                self._tidy()
                job.done.set()
                continue
            died = f"rank {self._vote.rank}: the writing thread died"
            outcome: Outcome | None = None
            try:
                outcome = self._finish(job)
            finally:
                if outcome is None:
                    # Something that nobody foresaw; Python prints its traceback, and the loop must still hear of it.
                    self._lost_touch = died
                    outcome = CheckpointFailed(step=job.request.step, reason=died)
                job.outcome = outcome
                try:
                    self._report(outcome)
                finally:
                    job.done.set()

    def _finish(self, job: _Job) -> Outcome:
        step = job.request.step
        started = time.perf_counter()
        if self._settle is not None:
            self._settle()
        try:
            saved = attempt(
                job.request, root=self._root, vote=self._vote, agreement=self._agreement, storage=self._storage
            )
        except SaveFailed as error:
            if isinstance(error, LostTouch):
                self._lost_touch = str(error)
            return CheckpointFailed(step=step, reason=str(error))
        self._lost_touch = saved.lost_touch
        self.proven.commit(step)
        if self._storage.keeps and saved.lost_touch is None:
            # The folder is a new one, also where its step was marked before.
            self._newest, self._marked = step, None
            self._tidy()
        return CheckpointSaved(
            step=step,
            path=saved.path,
            num_bytes=saved.num_bytes,
            stall_seconds=job.stall_seconds,
            write_seconds=time.perf_counter() - started,
        )

    def _tidy(self) -> None:
        """Mark the newest good checkpoint, and delete what has expired since."""
        if not self._storage.keeps:
            return
        good, keep, keep_every = self.proven.good, self._config.keep, self._config.keep_every
        try:
            if good is not None and good != self._marked:
                self._storage.mark_good(good)
                self._marked = good
            if self._newest is not None:
                stays = {*self.kept, *(() if self.proven.anchor is None else (self.proven.anchor,))}
                self._storage.expire(newest=self._newest, keep=keep, keep_every=keep_every, stays=stays)
        except OSError as error:
            self._report(
                Warned(
                    message=f"cannot delete expired checkpoints in {self._storage.where}, or mark good ones: {error}"
                )
            )


def open_saver(
    root: Path,
    *,
    world: World,
    config: CheckpointConfig,
    plan: str,
    report: Callable[[Event], None],
    settle: Callable[[], None],
    storage: Storage,
) -> Saver:
    """The saver of one rank of a run.

    Args:
        root: this rank's folder of the run's checkpoints.
        world: the ranks.
        config: which checkpoints are kept.
        plan: for the manifest.
        report: told how each save ended, on the saver's thread.
        settle: called before a save counts, so that what led there is on the disk too.
        storage: where checkpoints are.
    """
    return Saver(
        root,
        rank=world.rank,
        world_size=world.size,
        group=world.save_group,
        config=config,
        plan=plan,
        deadline_s=world.deadline_seconds,
        report=report,
        settle=settle,
        storage=storage,
    )
