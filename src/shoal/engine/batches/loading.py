"""The batches of a run whose size may change from step to step: a loader for each size, which goes on where the last one was.

A loader has loaded ahead with the old size when a change comes. Only the position after the batch that was handed out counts, so
what was loaded ahead is forgotten, and read again by the next loader.
"""

from collections.abc import Callable
from typing import Any

from shoal.data.loader import Loader, StepBatch
from shoal.data.order import Position
from shoal.data.source import Source


class Batches:
    """Hands out batches of the size that the next step has.

    Args:
        source: of the samples.
        batch: says how many samples the next step has.
        position: where to begin.
        options: what else there is to say to a ``Loader``.
    """

    def __init__(self, source: Source, *, batch: Callable[[], int], position: Position, **options: Any) -> None:
        self._source, self._batch, self._position, self._options = source, batch, position, options
        self._size = batch()
        self.loader = self._open()
        """The one that the last batch is from."""

    def _open(self) -> Loader:
        return Loader(self._source, global_batch=self._size, position=self._position, **self._options)

    def next(self) -> StepBatch:
        """The next step's batch; see ``Loader.next``."""
        if (size := self._batch()) != self._size:
            self.loader.close()
            self._size = size
            self.loader = self._open()
        found = self.loader.next()
        self._position = found.position
        return found

    def close(self) -> None:
        """Stop loading ahead. May be called twice."""
        self.loader.close()
