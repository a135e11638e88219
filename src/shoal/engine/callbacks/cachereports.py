"""Says in the events what the cache of a run's data has done: which tier answered, what was fetched, what it was waited for."""

from shoal.core.events import DataCache
from shoal.data.loading.planning import Cached
from shoal.engine.hooks import Hook, StepResult
from shoal.engine.reporting import Reporter

_EVERY = 50


class CacheReports(Hook):
    """Writes ``data_cache`` events after every fifty steps and at the end.

    Args:
        source: what is read through the cache.
        reporter: takes the events.
        opened: what the cache did while the data was opened, which is the first event.
    """

    def __init__(self, source: Cached, reporter: Reporter, opened: DataCache) -> None:
        self._source, self._reporter = source, reporter
        self._opened: DataCache | None = opened

    def on_update(self, step: int, result: StepResult) -> None:
        """Report after every fifty steps."""
        if step % _EVERY == 0:
            self._write()

    def on_end(self, step: int, status: str) -> None:
        """Report what has come since."""
        self._write()

    def _write(self) -> None:
        for found in (self._opened, self._source.cache_report()):
            if found is not None:
                self._reporter.event(found)
        self._opened = None
