"""A file that a run reads while it trains, and whether it is still the one that was opened.

A memory map shows what is written into its file later: the samples change under a run that has no way to notice. No torch.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Change = Literal["same", "touched", "shorter", "replaced"]


@dataclass(frozen=True, kw_only=True)
class WatchedFile:
    """A file as it was at some moment."""

    path: Path
    num_bytes: int
    needed_bytes: int
    """How long it was when it was opened: so much of it is read."""
    changed_ns: int
    """When it was written last."""
    identity: tuple[int, int]
    """Device and inode: another file of the same name has another one."""

    @classmethod
    def look(cls, path: Path) -> "WatchedFile":
        """The file as it is now."""
        found = os.stat(path)
        return cls(
            path=path,
            num_bytes=found.st_size,
            needed_bytes=found.st_size,
            changed_ns=found.st_mtime_ns,
            identity=(found.st_dev, found.st_ino),
        )

    def find_change(self) -> Change:
        """What became of it; ``touched`` is written to since, with what only a look inside tells."""
        try:
            now = self.look(self.path)
        except OSError:
            return "replaced"
        if now.identity != self.identity:
            return "replaced"
        if now.num_bytes < self.needed_bytes:
            return "shorter"
        return "same" if (now.num_bytes, now.changed_ns) == (self.num_bytes, self.changed_ns) else "touched"
