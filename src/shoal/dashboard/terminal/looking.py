"""Looks at a run for ``shoal top``: reads what is new, and makes the picture of it."""

import time
from pathlib import Path

from shoal.core.errors import RunError
from shoal.dashboard.opening import open_run
from shoal.dashboard.terminal.picture import Picture, take_picture
from shoal.dashboard.views.overview import run_row
from shoal.dashboard.views.story import story_items

_LINES = 8
"""Of the story."""
_NOT_EVENTS = ("culprit", "report", "skipped")
"""What the story says first, and the picture elsewhere."""


class Looker:
    """A run that is looked at again and again.

    Args:
        path: of the run directory.
    """

    def __init__(self, path: Path) -> None:
        self._given = path
        self._run = open_run(path)
        self.last: Picture | None = None

    def take(self) -> Picture:
        """Look, and make the picture.

        Raises:
            RunError: the run directory is no more.
        """
        if not self._run.path.is_dir():
            raise RunError(f"{self._given} was removed while it was looked at")
        self._run.look_once()
        now = time.time()
        lines = []
        told = [
            item for item in story_items(self._run, now) if item["t"] is not None and item["kind"] not in _NOT_EVENTS
        ]
        for item in told[-_LINES:]:
            moment = time.strftime("%H:%M:%S", time.localtime(item["t"]))
            lines.append(f"{moment} {item['text'].splitlines()[0] if item['text'] else ''}")
        self.last = take_picture(self._run, run_row(self._run, now), lines, now)
        return self.last
