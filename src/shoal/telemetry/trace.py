"""A trace of chosen steps by torch's profiler, as Chrome-trace JSON that opens in Perfetto.

Only chosen steps, because a trace of a whole run is gigabytes and the profiler slows what it watches. A trace that cannot be
written costs the trace, not the run.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from shoal.core.rundir import RunDir
from shoal.telemetry.config import parse_window
from shoal.telemetry.eventlog import warn_on_stderr


class Tracer:
    """Profiles the steps of a window and writes ``traces/rank-NNN.json`` when the last of them is done.

    Without a window every call returns at once.
    """

    def __init__(
        self, window: str | None, run_dir: Path, rank: int, *, warn: Callable[[str], None] = warn_on_stderr
    ) -> None:
        self.path = RunDir(run_dir).traces / f"rank-{rank:03d}.json"
        self._first, self._end = parse_window(window) if window is not None else (0, 0)
        self._warn = warn
        self._profiler: torch.profiler.profile | None = None
        self._is_done = window is None

    def before_step(self, step: int) -> None:
        """Call before each step with its number; the first step of a run is step 1."""
        if not self._is_done and self._profiler is None and self._first <= step < self._end:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def after_step(self, step: int) -> None:
        """Call after each step with its number."""
        if self._profiler is not None and step + 1 >= self._end:
            self.close()

    def close(self) -> None:
        """Write what was traced, when the run ends inside the window. Closing twice is allowed."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._is_done = True
        profiler.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            self._warn(f"cannot write the trace {self.path}: {error}; training goes on")
