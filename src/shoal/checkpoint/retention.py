"""Which checkpoints expire, as a pure decision, and the deletion of those.

The checkpoint that was just committed is always kept, so something whole is there whatever the state of the others. So is the
newest *good* one, from which a later step was taken: the state after the update that ruins the weights is saved before anybody
knows. Where none is known to be good, the oldest that may turn out to be is kept in its place. A folder that a glance does not
find whole neither counts nor is deleted: it may be somebody's evidence, or the only copy of a part.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from shoal.checkpoint.commit import remove
from shoal.checkpoint.files import NotWhole, sync_folder
from shoal.checkpoint.layout import Beside, beside_name, draw_id, parse_beside, parse_step, step_name
from shoal.checkpoint.whole import glance
from shoal.core.errors import RequestError


def expired(
    steps: Iterable[int], *, newest: int, keep: int, keep_every: int | None, good: int | None = None
) -> list[int]:
    """The steps to delete, oldest first.

    Args:
        steps: committed checkpoints.
        newest: the one just committed. Later steps belong to another lineage (a run that went back) and are left alone.
        keep: how many of the newest stay, ``newest`` among them; at least 1.
        keep_every: multiples of this stay for ever.
        good: the newest that is known to be good, or what stands in its place, which stays; None where there is none.
    """
    older = sorted(step for step in set(steps) if step < newest)
    candidates = older[: max(0, len(older) - (keep - 1))]
    return [step for step in candidates if step != good and (keep_every is None or step % keep_every != 0)]


def expire(root: Path, *, newest: int, keep: int, keep_every: int | None, good: int | None = None) -> list[int]:
    """Delete what has expired, as ``expired`` decides; the steps deleted.

    Raises:
        OSError: the disk refused; nothing is half deleted under a committed name.
    """
    steps = [step for name in os.listdir(root) if (step := parse_step(name)) is not None and is_committed(root / name)]
    if newest not in steps:
        # Without the anchor nothing is known to be whole, so nothing is deleted.
        return []
    deleted = expired(steps, newest=newest, keep=keep, keep_every=keep_every, good=good)
    for step in deleted:
        # Renamed first: a deletion cut short must not leave a torn folder under a committed name.
        doomed = root / beside_name(Beside.EXPIRED, step, draw_id())
        os.rename(root / step_name(step), doomed)
        remove(doomed)
    return deleted


def set_aside(root: Path, steps: Iterable[int]) -> list[int]:
    """Take the committed name from checkpoints that nobody should go on from; the steps of those that had it.

    They stay whole, for whoever looks for the cause, until the same step is set aside anew.

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


def is_committed(path: Path) -> bool:
    """True when a glance finds a whole checkpoint under this name."""
    try:
        glance(path)
    except (NotWhole, RequestError):
        return False
    return True
