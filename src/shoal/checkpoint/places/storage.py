"""What a place of checkpoints does for those who save and load, and the simplest: one folder that all ranks see.

Ranks go through a save together (``attempt.py``); what differs between places is who makes the draft, where a shard is written,
and what makes it a checkpoint.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.checkpoint.agreement import agree_on_checkpoint
from shoal.checkpoint.commit import Draft, abandon, begin, commit, write_part
from shoal.checkpoint.files import NotWhole, parse_step, step_name
from shoal.checkpoint.holdings import Cut
from shoal.checkpoint.manifest import Manifest, Part, merge
from shoal.checkpoint.retention import Fallback, expire, fall_back, mark_good, newest_good, refuse_only_aside
from shoal.checkpoint.shard import Blob
from shoal.checkpoint.vote import Phase, Votes
from shoal.checkpoint.whole import Found, committed_names, glance, newest_whole, verify
from shoal.comm.world import World
from shoal.core.clock import Deadline
from shoal.core.errors import AgreedError, RequestError


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What all ranks have written of a checkpoint, and nobody has committed."""

    parts: tuple[Part, ...]
    id: str
    step: int
    plan: str
    values: Mapping[str, Any]
    shared: Mapping[str, tuple[str, tuple[int, ...]]]
    deadline: Deadline

    def manifest(self, values: Mapping[str, Any] | None = None) -> Manifest:
        """The manifest of it, with this rank's values or those given.

        Raises:
            ValueError: it is too late, or no rank wrote a tensor that all have.
            NotWhole: what ranks wrote does not fit together.
        """
        if self.deadline.is_over:
            raise ValueError(f"the ranks took longer than {self.deadline.seconds:g} s to write")
        chosen = self.values if values is None else values
        found = merge(self.parts, id=self.id, step=self.step, plan=self.plan, values=chosen)
        for name, (dtype, shape) in self.shared.items():
            tensor = found.tensors.get(name)
            if tensor is None:
                raise ValueError(f"no rank wrote {name!r}; the ranks do not hold the same tensors")
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                kinds = f"{dtype} {shape} on rank 0 and {tensor.dtype} {tensor.shape}"
                raise ValueError(f"{name!r} is {kinds} on the rank that wrote it")
        return found


@dataclass(frozen=True, kw_only=True)
class Brought:
    """A checkpoint that all ranks are about to load, in a folder that this rank sees."""

    path: Path | None
    """None where there is none."""
    manifest: str = ""
    """SHA-256 of its manifest."""
    name: str = ""
    """What people call it."""
    step: int = 0
    refused: tuple[tuple[str, str], ...] = ()
    """The newer ones that were passed over, with the reasons."""
    is_copy: bool = False
    """The folder was put together to load from, and goes afterwards."""
    only_aside: str = ""
    """That there is nothing but what was set aside."""


class Storage(Protocol):
    """A place of checkpoints, as one rank sees it."""

    @property
    def where(self) -> str:
        """What people call it: a folder or an address."""

    @property
    def keeps(self) -> bool:
        """True on a rank that marks and deletes checkpoints."""

    @property
    def is_empty(self) -> bool:
        """True when no run has saved here before; the same on all ranks, while none saves."""

    def begin(self, step: int) -> Draft:
        """Rank 0 begins a save."""

    def join(self, draft: Draft) -> None:
        """Another rank is about to write to it."""

    def write(self, draft: Draft, rank: int, blobs: Mapping[str, Blob], cuts: Iterable[Cut]) -> Part:
        """Write this rank's shard."""

    def finish(self, draft: Draft, proposal: Proposal, vote: Votes) -> None:
        """Commit what all ranks have written; all call it together, and all raise when one cannot."""

    def is_committed(self, draft: Draft) -> bool:
        """True when this rank can see that a save is a checkpoint."""

    def name_of(self, draft: Draft) -> str:
        """What people call it then."""

    def abandon(self, draft: Draft, *, is_lost: bool) -> None:
        """Remove what a failed save wrote, where this rank is the one to do so; ``is_lost`` when the others cannot be heard."""

    def mark_good(self, step: int) -> None:
        """Say that a step was taken from this checkpoint."""

    def expire(self, *, newest: int, keep: int, keep_every: int | None, stays: Collection[int]) -> None:
        """Delete what has expired."""

    def newest_good(self, until: int) -> int | None:
        """On rank 0: the newest that is marked as good, up to a step."""

    def fall_back(self, good: int | None) -> Fallback:
        """On rank 0: set aside what is newer than the good one."""

    def follow_back(self, good: int | None) -> None:
        """On all others, once rank 0 has done it: the same, for their folders."""

    def bring(self, world: World, step: int | None) -> Brought:
        """Choose the newest whole checkpoint, or that of a step, and have it where this rank sees it. All ranks call it."""

    def give_back(self, brought: Brought) -> None:
        """All ranks have loaded it, or failed to."""


def told(act: Callable[[], object]) -> str | None:
    """Do something that makes a checkpoint: why it could not be done, or None."""
    try:
        act()
    except OSError as error:
        return f"cannot commit: {explain(error)}"
    except (ValueError, NotWhole) as error:
        return f"cannot commit: {error}"
    return None


def explain(error: OSError) -> str:
    """What the disk said, with the last part of the name that it is about."""
    where = f" ({os.path.basename(os.fspath(error.filename))})" if error.filename is not None else ""
    return f"{error.strerror or error}{where}"


class OneFolder:
    """A folder that all ranks see. Rank 0 makes the draft, commits it, and keeps the place tidy."""

    def __init__(self, root: Path, *, rank: int) -> None:
        self.root = root
        self.keeps = rank == 0

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.root)

    @property
    def is_empty(self) -> bool:
        """True when there is no committed name."""
        return not committed_names(self.root)

    def begin(self, step: int) -> Draft:
        """Make the draft's folder."""
        return begin(self.root, step)

    def join(self, draft: Draft) -> None:
        """Rank 0 has made the folder."""

    def write(self, draft: Draft, rank: int, blobs: Mapping[str, Blob], cuts: Iterable[Cut]) -> Part:
        """Write into the draft's folder."""
        return write_part(draft, rank, blobs, cuts=cuts)

    def finish(self, draft: Draft, proposal: Proposal, vote: Votes) -> None:
        """Rank 0 writes the manifest and renames."""
        problem = told(lambda: commit(draft, proposal.manifest())) if vote.rank == 0 else None
        vote.exchange(draft.step, Phase.COMMIT, proposal.deadline, problem=problem)

    def is_committed(self, draft: Draft) -> bool:
        """The disk decides."""
        return has_name(draft)

    def name_of(self, draft: Draft) -> str:
        """Its folder."""
        return str(draft.final)

    def abandon(self, draft: Draft, *, is_lost: bool) -> None:
        """Rank 0 removes the draft."""
        if self.keeps:
            abandon(draft)

    def mark_good(self, step: int) -> None:
        """See ``retention.mark_good``."""
        mark_good(self.root, step)

    def expire(self, *, newest: int, keep: int, keep_every: int | None, stays: Collection[int]) -> None:
        """See ``retention.expire``."""
        expire(self.root, newest=newest, keep=keep, keep_every=keep_every, stays=stays)

    def newest_good(self, until: int) -> int | None:
        """See ``retention.newest_good``."""
        return newest_good(self.root, until=until)

    def fall_back(self, good: int | None) -> Fallback:
        """See ``retention.fall_back``."""
        return fall_back(self.root, good)

    def follow_back(self, good: int | None) -> None:
        """There is no other folder."""

    def bring(self, world: World, step: int | None) -> Brought:
        """The first rank chooses, and all agree on that one's manifest before any of them loads."""
        found = self._choose(step) if world.is_first else Found(path=None, refused=())
        path, manifest = agree_on_checkpoint(world, self.root, found.path)
        refused = tuple((path.name, reason) for path, reason in found.refused)
        only_aside = ""
        if path is None and step is None:
            try:
                refuse_only_aside(self.root)
            except AgreedError as error:
                only_aside = str(error)
        found_step = (parse_step(path.name) if path is not None else None) or 0
        return Brought(
            path=path, manifest=manifest, name=str(path), step=found_step, refused=refused, only_aside=only_aside
        )

    def _choose(self, step: int | None) -> Found:
        if step is None:
            return newest_whole(self.root)
        path = self.root / step_name(step)
        problems = verify(path) if path.is_dir() else ["it is gone"]
        return Found(path=None if problems else path, refused=((path, "; ".join(problems)),) if problems else ())

    def give_back(self, brought: Brought) -> None:
        """It stays."""


def has_name(draft: Draft, *, parts: bool = False) -> bool:
    """True when the folder with a save's name is of this save."""
    try:
        return glance(draft.final, parts=parts).id == draft.id
    except (NotWhole, RequestError):
        return False
