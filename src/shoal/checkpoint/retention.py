"""Which checkpoints expire, and which one ``--resume`` takes after a value that was not finite. No torch.

The checkpoint that was just committed is always kept, so something whole is there whatever the state of the others. So is the
newest *good* one. A state is saved before anybody has computed with it, and is good once a step was taken from it: the step
after the one that ruins the weights finds a loss or a gradient that is not finite, and what was saved in between is whole but
useless. Where none is known to be good, the oldest that may turn out to be is kept in its place. A folder that a glance does
not find whole neither counts nor is deleted: it may be somebody's evidence, or the only copy of a part.

A good checkpoint's folder says so by an empty file, which lives and goes with it, so that the next process knows what this one
found. Newer ones than the good one are set aside and not deleted, and only while a good one is there to go back to.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.commit import remove
from shoal.checkpoint.files import (
    GOOD,
    Beside,
    NotWhole,
    beside_name,
    draw_id,
    parse_beside,
    parse_step,
    step_name,
    sync_folder,
)
from shoal.checkpoint.whole import committed_names, glance
from shoal.core.errors import AgreedError, RequestError


def expired(
    steps: Iterable[int], *, newest: int, keep: int, keep_every: int | None, stays: Collection[int] = ()
) -> list[int]:
    """The steps to delete, oldest first.

    Args:
        steps: committed checkpoints.
        newest: the one just committed. Later steps belong to another lineage (a run that went back) and are left alone.
        keep: how many of the newest stay, ``newest`` among them; at least 1.
        keep_every: multiples of this stay for ever.
        stays: others that stay: the newest that is known to be good, or what stands in its place, and the best by a metric.
    """
    older = sorted(step for step in set(steps) if step < newest)
    candidates = older[: max(0, len(older) - (keep - 1))]
    return [step for step in candidates if step not in stays and (keep_every is None or step % keep_every != 0)]


def expire(
    root: Path,
    *,
    newest: int,
    keep: int,
    keep_every: int | None,
    stays: Collection[int] = (),
    parts: bool = False,
) -> list[int]:
    """Delete what has expired, as ``expired`` decides; the steps deleted. With ``parts`` the folder has this host's files only.

    Raises:
        OSError: the disk refused; nothing is half deleted under a committed name.
    """
    named = [(step, root / name) for name in os.listdir(root) if (step := parse_step(name)) is not None]
    steps = [step for step, path in named if is_committed(path, parts=parts)]
    if newest not in steps:
        # Without the anchor nothing is known to be whole, so nothing is deleted.
        return []
    deleted = expired(steps, newest=newest, keep=keep, keep_every=keep_every, stays=stays)
    for step in deleted:
        # Renamed first: a deletion cut short must not leave a torn folder under a committed name.
        doomed = root / beside_name(Beside.EXPIRED, step, draw_id())
        os.rename(root / step_name(step), doomed)
        remove(doomed)
    return deleted


def set_aside(root: Path, steps: Iterable[int]) -> list[int]:
    """Take the committed name from checkpoints that nobody should go on from; the steps of those that had it.

    They stay whole, for people who look for the cause, until the same step is set aside anew.

    Raises:
        OSError: the disk refused.
    """
    done = []
    for step in sorted(steps):
        if os.path.lexists(root / step_name(step)):
            earlier = [path for other, path in list_aside(root) if other == step]
            os.rename(root / step_name(step), root / beside_name(Beside.ASIDE, step, draw_id()))
            for path in earlier:
                remove(path)
            done.append(step)
    if done:
        sync_folder(root)
    return done


def list_aside(root: Path) -> list[tuple[int, Path]]:
    """The folders that were set aside, oldest step first."""
    names = sorted(os.listdir(root)) if root.is_dir() else []
    besides = [(parse_beside(name), root / name) for name in names]
    return [(beside.step, path) for beside, path in besides if beside is not None and beside.kind is Beside.ASIDE]


def is_committed(path: Path, *, parts: bool = False) -> bool:
    """True when a glance finds a whole checkpoint under this name; with ``parts``, what this host has of one."""
    try:
        glance(path, parts=parts)
    except (NotWhole, RequestError):
        return False
    return True


def mark_good(root: Path, step: int) -> None:
    """Say on the disk that a step was taken from this checkpoint. One that is gone needs no mark.

    Raises:
        OSError: the disk refused.
    """
    folder = root / step_name(step)
    try:
        os.close(os.open(folder / GOOD, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
        sync_folder(folder)
    except FileNotFoundError:
        return


def newest_good(root: Path, *, until: int | None = None, parts: bool = False) -> int | None:
    """The step of the newest whole checkpoint that is marked as good, of those up to step ``until``; None when there is none."""
    for step, path in committed_names(root):
        if (until is None or step <= until) and os.path.lexists(path / GOOD) and is_committed(path, parts=parts):
            return step
    return None


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """What became of the checkpoints of a run that cannot go on."""

    good: int | None
    """The newest good one, from which ``--resume`` begins."""
    newest: int | None
    """The newest of all that have a committed name, now."""
    first_aside: int | None = None
    """The oldest that was set aside."""
    last_aside: int | None = None
    """The newest that was set aside."""

    def describe(self, root: Path | str) -> str:
        """What to say of it, with the folder or address that the checkpoints are in."""
        if self.newest is None:
            return "last good checkpoint: none"
        if self.good is None:
            newest = f"{root}/{step_name(self.newest)}"
            return (
                f"last good checkpoint: none is known (no step was taken from {newest}, where --resume would begin; to start "
                "over, use another --run-dir)"
            )
        said = f"last good checkpoint: {root}/{step_name(self.good)}"
        if self.first_aside is None or self.last_aside is None:
            return said
        if self.first_aside == self.last_aside:
            return f"{said} ({step_name(self.last_aside)} was set aside, because no step was taken from it)"
        names = f"{step_name(self.first_aside)} to {step_name(self.last_aside)}"
        return f"{said} (what was saved after it was set aside, {names}, because no step was taken from there)"


def fall_back(root: Path, good: int | None, *, parts: bool = False) -> Fallback:
    """Set aside what is newer than the good checkpoint ``good``; nothing where that is not on the disk.

    With ``parts`` the folder has this host's files of checkpoints, or none.

    Raises:
        OSError: the disk refused.
    """
    found = good if good is not None and is_committed(root / step_name(good), parts=parts) else None
    newer = [] if found is None else [step for step, _ in newer_than(root, found, parts=parts)]
    aside = set_aside(root, newer)
    return Fallback(
        good=found,
        newest=max((step for step, _ in committed_names(root)), default=None),
        first_aside=min(aside, default=None),
        last_aside=max(aside, default=None),
    )


def newer_than(root: Path, step: int, *, parts: bool = False) -> list[tuple[int, Path]]:
    """The committed checkpoints after a step."""
    return [(other, path) for other, path in committed_names(root) if other > step and is_committed(path, parts=parts)]


def refuse_only_aside(root: Path, *, parts: bool = False) -> None:
    """Refuse to go on where every checkpoint there is was set aside: a run would begin at step 0 and leave them lying.

    Raises:
        AgreedError: names them.
    """
    aside = list_aside(root)
    if not aside or any(is_committed(path, parts=parts) for _, path in committed_names(root)):
        return
    raise AgreedError(describe_aside(root, aside))


def describe_aside(root: Path, aside: Sequence[tuple[int, Path]]) -> str:
    """That there is nothing to go on from but what was set aside."""
    named = ", ".join(path.name for _, path in aside)
    return (
        f"{root} has no checkpoint to go on from, only what was set aside after a value that was not finite: {named}. To go on "
        f"from one, rename it, such as to {step_name(aside[-1][0])}; to start over, use another --run-dir"
    )


class Proven:
    """What one process knows of the checkpoints of its own run. One thread tells of commits, another of steps."""

    def __init__(self) -> None:
        self._committed: tuple[int, ...] = ()
        """Of this run, oldest first, as far back as the newest good one."""
        self._taken = 0

    def begin(self, step: int, *, good: int | None) -> None:
        """The run goes on from this checkpoint; ``good`` is the newest on the disk, up to this one, that is marked as good."""
        self._committed = (step,) if good is None or good == step else (good, step)
        self._taken = step + 1 if good == step else step

    def commit(self, step: int) -> None:
        """A checkpoint has got its name."""
        known = (other for other in self._committed if other != step and other >= (self.good or 0))
        self._committed = (*known, step)

    def take(self, step: int) -> bool:
        """All that step number ``step`` computed with and found was finite; True when that makes a newer checkpoint good."""
        before, self._taken = self.good, max(self._taken, step)
        return self.good != before

    @property
    def good(self) -> int | None:
        """The step of the newest good checkpoint; None when there is none."""
        return max((step for step in self._committed if step < self._taken), default=None)

    @property
    def anchor(self) -> int | None:
        """The step of the checkpoint that retention must leave: the newest good one, else the oldest that may turn out to be."""
        return self.good if self.good is not None else min(self._committed, default=None)
