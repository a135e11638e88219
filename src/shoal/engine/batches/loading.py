"""The batches of a run whose size may change from step to step: a loader for each size, which goes on where the last one was.

A loader has loaded ahead with the old size when a change comes. Only the position after the batch that was handed out counts, so
what was loaded ahead is forgotten, and read again by the next loader.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shoal.data.loading.loader import Loader, StepBatch
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

    def move(self, position: Position) -> None:
        """Go on elsewhere, or in data that has changed since; what was loaded ahead is forgotten."""
        self.loader.close()
        self._position = position
        self.loader = self._open()

    def close(self) -> None:
        """Stop loading ahead. May be called twice."""
        self.loader.close()


class RoundBatches:
    """Hands out what this rank computes in all rounds of a step: its own share, and those of absent replicas.

    Args:
        source: of the samples.
        rounds: the logical replica of each round; None where there is none left for this rank.
        options: those of ``Batches``.
    """

    def __init__(self, source: Source, *, rounds: Sequence[int | None], **options: Any) -> None:
        self._parts = [None if one is None else Batches(source, replica=one, **options) for one in rounds]
        first = self._parts[0]
        assert first is not None, "everyone who is present has a share"
        self._first = first

    @property
    def loader(self) -> Loader:
        """The one that the last batch of the first round is from."""
        return self._first.loader

    def next(self) -> StepBatch:
        """The next step's batch, with those of later rounds."""
        found, *later = [None if part is None else part.next() for part in self._parts]
        assert found is not None
        return replace(found, later=tuple(later)) if later else found

    def move(self, position: Position) -> None:
        """Go on elsewhere, or in data that has changed since; what was loaded ahead is forgotten."""
        for part in self._parts:
            if part is not None:
                part.move(position)

    def close(self) -> None:
        """Stop loading ahead. May be called twice."""
        for part in self._parts:
            if part is not None:
                part.close()
