"""Whether the disk can hold what is going to be written, asked before the first step and not found out at the first save."""

import os
import shutil
from pathlib import Path

from shoal.core.units import format_bytes


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
