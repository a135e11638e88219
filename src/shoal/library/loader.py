"""The loader of a script's own loop: every turn is one global step, every pass one epoch, and its place is in the checkpoint."""

from collections.abc import Callable, Iterator
from typing import Any

from shoal.data.loader import Loader, StepBatch
from shoal.data.order import Position
from shoal.data.source import Source, Splits
from shoal.engine.resolve import ResolvedPlan


class RunLoader:
    """Iterates over one epoch of a dataset, in global steps; made by ``run.loader``.

        for epoch in range(loader.epoch, 10):
            for batch in loader:
                loss = run.forward_backward(batch)

    A ``batch`` is this replica's part of the global batch, already cut into microbatches. A loader that was taken up from a
    checkpoint goes on in the middle of its epoch. When the run was asked to stop, iteration ends.

    Args:
        data: the dataset.
        resolved: how the plan cuts a global batch of it.
        global_batch: samples per step, over all replicas.
        seed: of the order.
        place: this replica's number and how many there are, asked for when reading begins.
        is_stopping: True when the run was asked to stop.
        begin: called before anything is read or the place is told, because a checkpoint may have another.
        workers: loader processes.
    """

    def __init__(
        self,
        data: Splits,
        *,
        resolved: ResolvedPlan,
        global_batch: int,
        seed: int,
        place: Callable[[], tuple[int, int]],
        is_stopping: Callable[[], bool],
        begin: Callable[[], None],
        workers: int = 0,
    ) -> None:
        self.data = data
        self.resolved = resolved
        self.global_batch = global_batch
        self.position = Position()
        """Where the data is after the newest batch."""
        self._seed, self._place, self._workers = seed, place, workers
        self._is_stopping, self._begin = is_stopping, begin
        self._open: Loader | None = None

    @property
    def epoch(self) -> int:
        """Epochs that are done; in the middle of one, its number from 0."""
        self._begin()
        return self.position.epoch

    @property
    def source(self) -> Source:
        """The dataset, as evaluations read it."""
        return self.data.train

    def __len__(self) -> int:
        """Steps of an epoch; the last may be short."""
        return -(-len(self.data.train) // self.global_batch)

    def __iter__(self) -> Iterator[StepBatch]:
        """The rest of this epoch."""
        self._begin()
        epoch = self.position.epoch
        while self.position.epoch == epoch and not self._is_stopping():
            batch = self._next()
            self.position = batch.position
            yield batch

    def _next(self) -> StepBatch:
        if self._open is None:
            replica, count = self._place()
            self._open = Loader(
                self.data.train,
                global_batch=self.global_batch,
                micro_batch=self.resolved.micro_batch,
                replica=replica,
                num_replicas=count,
                seed=self._seed,
                position=self.position,
                workers=self._workers,
            )
        return self._open.next()

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON."""
        return {"epoch": self.position.epoch, "offset": self.position.offset}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.close()
        self.position = Position(epoch=int(state["epoch"]), offset=int(state["offset"]))

    def close(self) -> None:
        """Stop loading ahead."""
        if self._open is not None:
            self._open.close()
            self._open = None
