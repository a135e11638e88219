"""Leftovers of saves that died, removed at the next start, before anything is read or written.

Only names that Shoal gives are touched. The caller makes sure that no other process is saving into the folder: the run
directory is held by one run at a time.
"""

import os
from pathlib import Path

from shoal.checkpoint.commit import remove
from shoal.checkpoint.layout import Beside, parse_beside, step_name


def is_leftover(name: str) -> bool:
    """True for a name that a dead save leaves; not for what was set aside on purpose, which is whole."""
    beside = parse_beside(name)
    return beside is not None and beside.kind is not Beside.ASIDE


def sweep(root: Path) -> list[str]:
    """Remove leftovers and put back what a dead save had set aside; one line for each thing done."""
    if not root.is_dir():
        return []
    done = []
    for name in sorted(os.listdir(root)):
        beside = parse_beside(name)
        if beside is None or not is_leftover(name):
            continue
        final = root / step_name(beside.step)
        if beside.kind is Beside.REPLACED and not os.path.lexists(final):
            # The save died after it moved the older folder away and before it took the name: the older one is the checkpoint.
            os.rename(root / name, final)
            done.append(f"put back {final.name}, which a dead save had set aside")
        else:
            remove(root / name)
            done.append(f"removed {name}, left by a dead save")
    return done
