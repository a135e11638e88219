"""A folder of runs, or one run: found, followed, and known by ids that are no paths."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.dashboard.runs.cache import ColumnCache
from shoal.dashboard.runs.files import STRANGE, Unreadable, list_inside, why
from shoal.dashboard.runs.run import Run

_MARKS = ("recipe.toml", "plan.json", "summary.json", "live.json")
_DEPTH = 3
_MOST_RUNS = 5000
_FIND_EVERY_S = 2.0
_ASLEEP_EVERY_S = 5.0
_AWAKE_S = 60.0


def is_run(path: Path) -> bool:
    """True for a folder that a run has left something in; False also for one that may not be looked into."""
    try:
        return _has_marks(path)
    except OSError:
        return False


def _has_marks(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS) or (path / "events").is_dir()


class _Search:
    """One search for runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: dict[str, Path] = {}
        """Run directories, by the names that are shown."""
        self.skipped: dict[str, str] = {}
        self._closed: list[str] = []
        """Paths that the system did not let us look into."""

    def begin(self) -> None:
        """Search."""
        try:
            if _has_marks(self.root):
                self.found[self.root.name] = self.root
            else:
                self._look_into(self.root, "", 1)
        except (OSError, Unreadable) as error:
            self._close(self.root, str(self.root), error)

    def _look_into(self, folder: Path, prefix: str, depth: int) -> None:
        for name in list_inside(self.root, folder):
            if name.startswith(".") or len(self.found) >= _MOST_RUNS:
                continue
            path, shown = folder / name, f"{prefix}{name}"
            try:
                self._judge(path, shown, depth)
            except (OSError, Unreadable) as error:
                self._close(path, shown, error)

    def _judge(self, path: Path, shown: str, depth: int) -> None:
        if not path.is_dir():
            return
        real = os.path.realpath(path)
        if not real.startswith(f"{str(self.root).rstrip('/')}/"):
            self.skipped[shown] = "a link that leads out of the folder"
        elif path.is_symlink():
            self.skipped[shown] = "a link to another folder here"
        elif _has_marks(path):
            self.found[shown] = path
        elif depth < _DEPTH:
            self._look_into(path, f"{shown}/", depth + 1)

    def _close(self, path: Path, shown: str, error: OSError | Unreadable) -> None:
        self.skipped[shown] = why(error) if isinstance(error, OSError) else str(error)
        self._closed.append(str(path))

    def is_behind_closed(self, path: Path) -> bool:
        """True for a path that the search could not get to."""
        return any(str(path) == closed or str(path).startswith(f"{closed.rstrip('/')}/") for closed in self._closed)


class Busy(Exception):
    """Runs cannot be held still: one of them is being read and does not come to an end."""


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
        self.trouble = ""
        """What kept the last look from its end; empty where nothing did."""
        self._found_at = float("-inf")
        self._looked_at: dict[str, float] = {}
        self._lock = threading.RLock()
        self._counting, self._waiting = threading.Lock(), 0

    @contextlib.contextmanager
    def reading(self, seconds: float = -1) -> Iterator[None]:
        """Hold the runs still.

        Args:
            seconds: to wait for it at most; negative for as long as it takes.

        Raises:
            Busy: they are still being read by then, as where a file server does not answer.
        """
        with self._counting:
            self._waiting += 1
        has_lock = self._lock.acquire(timeout=seconds)
        with self._counting:
            self._waiting -= 1
        if not has_lock:
            raise Busy
        try:
            yield
        finally:
            self._lock.release()

    def find(self) -> None:
        """Look for runs that came or went."""
        search = _Search(self.path)
        search.begin()
        runs = {}
        for name, path in search.found.items():
            run = Run(path, root=self.path, name=name, cache=self._cache)
            runs[run.id] = self.runs.get(run.id, run)
        # What is behind a folder that cannot be looked into now is not gone for that.
        runs |= {known: run for known, run in self.runs.items() if search.is_behind_closed(run.path)}
        skipped = search.skipped
        with self._lock:
            self.gone += [known for known in self.runs if known not in runs]
            self.runs, self.skipped = runs, skipped

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
        if live is not None and live.get("status") == "running":
            return True
        # What was never seen to change is as old as it says.
        still = run.stillness
        return still.seconds < _AWAKE_S and (still.has_moved or abs(time.time() - run.newest) < _AWAKE_S)

    def _follow(self, run: Run) -> None:
        steps = run.look()
        while True:
            # A lock that is taken again at once is never handed over: those who wait for it get a moment.
            if self._waiting:
                time.sleep(0.001)
            with self._lock:
                try:
                    is_over = next(steps, self) is self
                    self.strange.pop(run.id, None)
                except (OSError, *STRANGE) as error:
                    # Nobody else's run shall stop being followed for it.
                    self.strange[run.id] = f"{type(error).__name__}: {error}"
                    return
            if is_over:
                break
        # Columns are written down without the lock: nobody but this thread changes them.
        for file in run.keep():
            with self._lock:
                run.remap(file)
