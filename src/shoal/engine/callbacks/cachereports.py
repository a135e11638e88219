"""Says in the events what the cache of a run's data has done: which tier answered, what was fetched, what it was waited for."""

from shoal.core.events import Event
from shoal.data.loading.planning import Plans
from shoal.engine.hooks import Hook, StepResult
from shoal.engine.reporting import Reporter

_EVERY = 50


class CacheReports(Hook):
    """Writes a ``data_cache`` event after every fifty steps and at the end."""

    def __init__(self, source: Plans, reporter: Reporter) -> None:
        self._source, self._reporter = source, reporter

    def on_update(self, step: int, result: StepResult) -> None:
        """Report after every fifty steps."""
        if step % _EVERY == 0:
            self._write()

    def on_end(self, step: int, status: str) -> None:
        """Report what has come since."""
        self._write()

    def _write(self) -> None:
        found: Event | None = self._source.cache_report()
        if found is not None:
            self._reporter.event(found)
