"""A folder of runs, or one run: found, followed, and known by ids that are no paths."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.dashboard.runs.cache import ColumnCache
from shoal.dashboard.runs.files import STRANGE, list_inside
from shoal.dashboard.runs.run import Run

_MARKS = ("recipe.toml", "plan.json", "summary.json", "live.json")
_DEPTH = 3
_MOST_RUNS = 5000
_FIND_EVERY_S = 2.0
_ASLEEP_EVERY_S = 5.0
_AWAKE_S = 60.0


def is_run(path: Path) -> bool:
    """True for a folder that a run has left something in."""
    return any((path / mark).is_file() for mark in _MARKS) or (path / "events").is_dir()


class RunFolder:
    """Runs below a folder, which may be one run itself, or not there yet.

    Args:
        path: of the folder.
        cache: of columns; None for none.
    """

    def __init__(self, path: Path, cache: ColumnCache | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        self._cache = cache
        self.runs: dict[str, Run] = {}
        """By id."""
        self.skipped: dict[str, str] = {}
        """Folders that are not looked into, and why."""
        self.gone: list[str] = []
        """Ids of runs whose folders were removed."""
        self.strange: dict[str, str] = {}
        """Runs that could not be read to their end, and what was raised."""
        self._found_at = float("-inf")
        self._looked_at: dict[str, float] = {}
        self._lock = threading.RLock()
        self._counting, self._waiting = threading.Lock(), 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the runs still."""
        with self._counting:
            self._waiting += 1
        with self._lock:
            with self._counting:
                self._waiting -= 1
            yield

    def find(self) -> None:
        """Look for runs that came or went."""
        found: dict[str, Path] = {}
        skipped: dict[str, str] = {}
        if is_run(self.path):
            found[self.path.name] = self.path
        else:
            self._find_below(self.path, "", 1, found, skipped)
        runs = {}
        for name, path in found.items():
            run = Run(path, root=self.path, name=name, cache=self._cache)
            runs[run.id] = self.runs.get(run.id, run)
        with self._lock:
            self.gone += [known for known in self.runs if known not in runs]
            self.runs, self.skipped = runs, skipped

    def _find_below(
        self, folder: Path, prefix: str, depth: int, found: dict[str, Path], skipped: dict[str, str]
    ) -> None:
        for name in list_inside(self.path, folder):
            if name.startswith(".") or len(found) >= _MOST_RUNS:
                continue
            path, shown = folder / name, f"{prefix}{name}"
            if not path.is_dir():
                continue
            real = os.path.realpath(path)
            if not real.startswith(f"{str(self.path).rstrip('/')}/"):
                skipped[shown] = "a link that leads out of the folder"
            elif path.is_symlink():
                skipped[shown] = "a link to another folder here"
            elif is_run(path):
                found[shown] = path
            elif depth < _DEPTH:
                self._find_below(path, f"{shown}/", depth + 1, found, skipped)

    @property
    def read_runs(self) -> list[Run]:
        """The runs that were looked at already."""
        return [run for run in self.runs.values() if run.id in self._looked_at]

    def look(
        self,
        *,
        all_runs: bool = False,
        stop: Callable[[], bool] = lambda: False,
        after_run: Callable[[], None] = lambda: None,
    ) -> None:
        """Read what is new in runs. One that has been quiet for a while is looked at less often.

        Args:
            all_runs: look at quiet ones as well.
            stop: says whether to stop.
            after_run: called after each run that was looked at.
        """
        now = time.monotonic()
        if all_runs or now - self._found_at >= _FIND_EVERY_S:
            self._found_at = now
            self.find()
        for run in list(self.runs.values()):
            if stop():
                return
            if not all_runs and not self._is_due(run, now):
                continue
            self._follow(run)
            self._looked_at[run.id] = now
            after_run()

    def _is_due(self, run: Run, now: float) -> bool:
        looked = self._looked_at.get(run.id)
        if looked is None or now - looked >= _ASLEEP_EVERY_S:
            return True
        live = run.live
        is_live = live is not None and live.get("status") == "running"
        return is_live or time.time() - max(run.newest, run.live_changed_at) < _AWAKE_S

    def _follow(self, run: Run) -> None:
        steps = run.look()
        while True:
            # A lock that is taken again at once is never handed over: those who wait for it get a moment.
            if self._waiting:
                time.sleep(0.001)
            with self._lock:
                try:
                    if next(steps, self) is self:
                        return
                except STRANGE as error:
                    # Nobody else's run shall stop being followed for it.
                    self.strange[run.id] = f"{type(error).__name__}: {error}"
                    return
