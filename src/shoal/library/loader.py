"""The loader of a script's own loop: every turn is one global step, every pass one epoch, and its place is in the checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

from torch.utils.data import DataLoader

from shoal.comm.world import World
from shoal.core.errors import RequestError, did_you_mean
from shoal.core.events import Event
from shoal.data.loading.loader import StepBatch
from shoal.data.loading.steploader import StepLoader
from shoal.data.options import LoaderOptions
from shoal.data.receipt import ReceiptState
from shoal.data.source import Source
from shoal.data.sources.iterable import is_iterable_only
from shoal.data.sources.own import from_dataset, stream_splits
from shoal.engine.batches.receipt import ReceiptCounter
from shoal.engine.resolve import ResolvedPlan

_ELSEWHERE = {
    "batch_size": "global_batch= is the samples of a step over all replicas, on any number of processes",
    "generator": "the order of samples is drawn by shoal.Run(seed=), the same on every process",
}
"""Arguments of torch's ``DataLoader`` that a loader of a run does not take, and what says the same."""


def read_options(dataset: Any, options: Mapping[str, Any], global_batch: object) -> LoaderOptions:
    """What ``run.loader`` was given beside the dataset and the size of a batch.

    Raises:
        RequestError: the dataset is a loader already, an option is none, or the size is missing.
    """
    if isinstance(dataset, DataLoader):
        raise RequestError(
            "run.loader takes the dataset and DataLoader's options, not a DataLoader; give loader.dataset"
        )
    known = [field.name for field in fields(LoaderOptions)]
    for name in options:
        if name not in known:
            raise RequestError(f"run.loader has no {name!r}; {_ELSEWHERE.get(name) or did_you_mean(name, known)}")
    if global_batch is None:
        raise RequestError(
            "run.loader needs the size of a batch: global_batch= is the samples of a step over all replicas, on any number of "
            "processes"
        )
    return LoaderOptions(**options)


def check_batch(given: object) -> None:
    """Refuse what is no batch of a loader of a run.

    Raises:
        RequestError: says where batches come from.
    """
    if not isinstance(given, StepBatch):
        raise RequestError(
            f"a step takes a batch of run.loader(dataset, global_batch=...), and was given a {type(given).__name__}; iterate "
            "over that loader, which takes the options of torch's DataLoader"
        )


def held_out(data: Any, loaders: "Sequence[RunLoader]") -> Source:
    """What an evaluation reads: a loader's samples, or those of a dataset, made to batches and counted as the first loader's are.

    Args:
        data: a loader of the run, or a dataset; each rank goes through the whole of an iterable one, and keeps its part.
        loaders: of the run; the model was set up with the first, unless it was told otherwise.

    Raises:
        RequestError: it is no dataset.
    """
    first = loaders[0] if loaders else None
    collate_fn = None if first is None else first.options.collate_fn
    source: Source
    if isinstance(data, RunLoader):
        source = data.source
    elif is_iterable_only(data):
        source = stream_splits(data, LoaderOptions(collate_fn=collate_fn), seed=0).train
    else:
        source = from_dataset(data, collate_fn=collate_fn).train
    counted, own = getattr(getattr(first, "source", None), "collator", None), getattr(source, "collator", None)
    if counted is not None and own is not None:
        own.first_label_counts = counted.first_label_counts
    return source


class RunLoader(StepLoader):
    """Iterates over one epoch of a dataset, in global steps; made by ``run.loader``.

        for epoch in range(loader.epoch, 10):
            for batch in loader:
                loss = run.forward_backward(batch)

    A ``batch`` is this replica's part of the global batch, already cut into microbatches. A loader that was taken up from a
    checkpoint goes on in the middle of its epoch. When the run was asked to stop, iteration ends.

    Args:
        dataset: map-style or iterable.
        resolved: how the plan cuts a global batch of it.
        global_batch: samples per step, over all replicas.
        seed: of the order.
        options: how samples are ordered, made to batches and loaded.
        world: the processes.
        place: this replica's number, and how many there are.
        is_stopping: True when the run was asked to stop.
        begin: called before the place is told, because a checkpoint may have another.
        between: called between two steps, before the next batch is read.
        loading: surrounds what a step waits for data.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        resolved: ResolvedPlan,
        global_batch: int,
        seed: int,
        options: LoaderOptions,
        world: World,
        place: tuple[int, int],
        is_stopping: Callable[[], bool],
        begin: Callable[[], None],
        between: Callable[[], None],
        loading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._is_stopping, self._begin, self._between, self._loading = is_stopping, begin, between, loading
        self.resolved = resolved
        super().__init__(dataset, global_batch=global_batch, seed=seed, options=options, world=world)
        islands = resolved.plan.islands
        replica, count = place
        self._handed: StepBatch | None = None
        """The last batch that was handed out, while the script has not trained on it."""
        self.receipt = ReceiptCounter(self.source, world=world, replica=replica, seed=seed, options=options)
        """Whether every epoch is every sample once."""
        self.place(replica=replica, num_replicas=count, micro_batch=resolved.micro_batch, num_islands=islands)

    @property
    def epoch(self) -> int:
        """Epochs that are done; in the middle of one, its number from 0."""
        self._begin()
        return self.position.epoch

    def next(self) -> StepBatch:
        """See ``StepLoader.next``."""
        if self._handed is not None:
            self.receipt.give_up("the script left a batch out that its loader gave it")
        self._handed = super().next()
        return self._handed

    def _peek(self) -> StepBatch:
        with self._loading():
            return super()._peek()

    def count(self, batch: StepBatch, report: Callable[[Event], None]) -> None:
        """The script has trained on a batch; one of another loader, or one that was counted, is left alone.

        All ranks call it together.

        Args:
            batch: that a pass was made over.
            report: told of the receipt at the end of an epoch.

        Raises:
            RunError: an epoch ends with it, and was not every sample once.
        """
        if batch is not self._handed:
            return
        self._handed = None
        self.receipt.report = report
        self.receipt.before_step(batch)
        self.receipt.after_step(batch)

    def state_to_save(self) -> dict[str, Any]:
        """What ``state_dict`` says, and the receipt of the epoch so far. All ranks call it together."""
        receipt = self.receipt.agree()
        if receipt is not None and self._handed is not None:
            receipt = replace(receipt, reason="the run was saved between reading a batch and training on it")
        return self.state_dict() | ({} if receipt is None else {"receipt": receipt.as_values()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``StepLoader.load_state_dict``."""
        super().load_state_dict(state)
        kept = state.get("receipt")
        try:
            known = None if kept is None else ReceiptState.from_values(kept)
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"the receipt in the loader's state is none: {error}") from error
        self._handed = None
        self.receipt.take_up(known, self.position)

    def __iter__(self) -> Iterator[StepBatch]:
        """The rest of this epoch, or less where the run is asked to stop."""
        self._begin()
        steps = super().__iter__()
        while True:
            self._between()
            batch = None if self._is_stopping() else next(steps, None)
            if batch is None:
                return
            yield batch

    def steps(self, count: int) -> Iterator[StepBatch]:
        """So many steps, over epochs, or less where the run is asked to stop."""
        self._begin()
        for _ in range(count):
            self._between()
            if self._is_stopping():
                return
            yield self.next()
