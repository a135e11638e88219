"""Which checkpoint ``--resume`` takes after a value that was not finite: the newest good one.

A checkpoint is *good* once a step was taken from it, and its folder says so by an empty file, which lives and goes with it: what
one process found, the next one knows. Newer ones are set aside and not deleted, and only while a good one is there to go back to.
No torch.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.files import sync_folder
from shoal.checkpoint.layout import GOOD, step_name
from shoal.checkpoint.retention import is_committed, list_aside, set_aside
from shoal.checkpoint.whole import committed_names
from shoal.core.errors import AgreedError


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


def newest_good(root: Path, *, until: int | None = None) -> int | None:
    """The step of the newest whole checkpoint that is marked as good, of those up to step ``until``; None when there is none."""
    for step, path in committed_names(root):
        if (until is None or step <= until) and os.path.lexists(path / GOOD) and is_committed(path):
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

    def describe(self, root: Path) -> str:
        """What to say of it."""
        if self.newest is None:
            return "last good checkpoint: none"
        if self.good is None:
            newest = root / step_name(self.newest)
            return (
                f"last good checkpoint: none is known (no step was taken from {newest}, where --resume would begin; to start "
                "over, use another --run-dir)"
            )
        said = f"last good checkpoint: {root / step_name(self.good)}"
        if self.first_aside is None or self.last_aside is None:
            return said
        if self.first_aside == self.last_aside:
            return f"{said} ({step_name(self.last_aside)} was set aside, because no step was taken from it)"
        names = f"{step_name(self.first_aside)} to {step_name(self.last_aside)}"
        return f"{said} (what was saved after it was set aside, {names}, because no step was taken from there)"


def fall_back(root: Path, good: int | None) -> Fallback:
    """Set aside what is newer than the good checkpoint ``good``; nothing where that is not on the disk.

    Raises:
        OSError: the disk refused.
    """
    found = good if good is not None and is_committed(root / step_name(good)) else None
    newer = (
        [] if found is None else [step for step, path in committed_names(root) if step > found and is_committed(path)]
    )
    aside = set_aside(root, newer)
    return Fallback(
        good=found,
        newest=max((step for step, _ in committed_names(root)), default=None),
        first_aside=min(aside, default=None),
        last_aside=max(aside, default=None),
    )


def refuse_only_aside(root: Path) -> None:
    """Refuse to go on where every checkpoint there is was set aside: a run would begin at step 0 and leave them lying.

    Raises:
        AgreedError: names them.
    """
    aside = list_aside(root)
    if not aside or any(is_committed(path) for _, path in committed_names(root)):
        return
    named = ", ".join(path.name for _, path in aside)
    raise AgreedError(
        f"{root} has no checkpoint to go on from, only what was set aside after a value that was not finite: {named}. To go on "
        f"from one, rename it, such as to {step_name(aside[-1][0])}; to start over, use another --run-dir"
    )
