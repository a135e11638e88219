"""Loader processes: torch's own, each making whole microbatches (of a stream: whole steps), handed back in order.

torch's loader would draw the workers' seed from the global generator, wait for a dead worker without end and hand an error's
traceback over as its message; what is different here is that, the order of samples, and the memory that batches travel in.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from shoal.comm.parentdeath import die_with_parent
from shoal.core.clock import Deadline
from shoal.core.errors import RunError, ShoalError
from shoal.data.loading.parts import Part, StreamPlan
from shoal.data.loading.sharedmemory import SharedBatch, SharedBatchWriter
from shoal.data.order import Ids
from shoal.data.source import Items, Source

_LOOK_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How many loader processes there are, and how they begin."""

    num_workers: int
    prefetch: int
    """Batches that each loads ahead."""
    deadline_s: float
    """The longest wait for one."""
    seed: int
    """Of their global generators."""
    init: Callable[[int], None] | None = None
    """The user's ``worker_init_fn``."""


@dataclass(frozen=True)
class _LoadedStep:
    """A step of a stream, with its microbatches in shared memory."""

    part: Part
    batches: list[SharedBatch | Items]


class _Microbatches(Dataset["SharedBatch | Items | ShoalError"]):
    """A source as torch's workers see it: an index is the ids of one microbatch.

    An error with a message for people is handed back as a value: torch would raise it with its traceback as the message.
    """

    def __init__(self, source: Source, writer: SharedBatchWriter) -> None:
        self._source = source
        self._writer = writer

    def __getitem__(self, ids: Ids) -> SharedBatch | Items | ShoalError:
        try:
            return self._writer.write(self._source.collate(ids))
        except ShoalError as error:
            return error


class _StreamSteps(IterableDataset["_LoadedStep | ShoalError"]):
    """A stream as torch's workers see it: each reads all of it, and makes the batches of every so many-th step."""

    def __init__(self, plan: StreamPlan, writer: SharedBatchWriter) -> None:
        self._plan = plan
        self._writer = writer

    def __iter__(self) -> Iterator["_LoadedStep | ShoalError"]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info is not None else (0, 1)
        # A dataset that deals its samples out to loader processes would leave most of them out: here each reads the whole stream.
        torch_worker._worker_info = None
        source = self._plan.source
        try:
            for place, part in enumerate(self._plan.parts()):
                if place % count == number:
                    batches = [self._writer.write(part.collate(source, own)) for own in range(len(part.microbatches))]
                    yield _LoadedStep(replace(part, samples=None), batches)
        except ShoalError as error:
            yield error


class LoaderProcesses:
    """Loader processes and what they hand back; they die with the thread that made this."""

    def __init__(self, dataset: Any, options: WorkerOptions, *, sampler: Iterator[Ids] | None = None) -> None:
        self._deadline_s = options.deadline_s
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=options.num_workers,
            prefetch_factor=max(1, options.prefetch),
            collate_fn=_unchanged,
            worker_init_fn=_Begin(os.getpid(), options.init),
            # A worker that exits with 0 is only looked for when this has passed.
            timeout=min(_LOOK_SECONDS, options.deadline_s),
            # Otherwise torch draws the workers' seed from the global generator, which a resumed run has just put back.
            generator=torch.Generator().manual_seed(options.seed),
        )
        # Made here, not in a thread: a worker dies with the thread that started it.
        self._iterator: Iterator[Any] | None = iter(loader)

    @classmethod
    def of_source(cls, source: Source, parts: Iterator[Part], options: WorkerOptions) -> "LoaderProcesses":
        """Of a map-style source, whose microbatches are known here."""
        # Each worker has at most the prefetched ones and the one that is being opened here in its hands.
        dataset = _Microbatches(source, SharedBatchWriter(keep=max(1, options.prefetch) + 2))
        return cls(dataset, options, sampler=(ids for part in parts for ids in part.microbatches))

    @classmethod
    def of_stream(cls, plan: StreamPlan, options: WorkerOptions) -> "LoaderProcesses":
        """Of a stream, whose steps only who reads it knows."""
        keep = (max(1, options.prefetch) + 2) * plan.share.num_microbatches
        return cls(_StreamSteps(plan, SharedBatchWriter(keep=keep)), options)

    def next(self) -> Items:
        """The next microbatch of a source.

        Raises:
            RunError: it did not come in time, or a loader process failed.
        """
        found = self._next()
        return found.open() if isinstance(found, SharedBatch) else found

    def next_step(self) -> tuple[Part, list[Items]]:
        """The next step of a stream, and its microbatches.

        Raises:
            RunError: it did not come in time, or a loader process failed.
        """
        found = self._next()
        return found.part, [batch.open() if isinstance(batch, SharedBatch) else batch for batch in found.batches]

    def _next(self) -> Any:
        if self._iterator is None:
            raise RunError("the loader was asked for a batch after close()")
        limit = Deadline(seconds=self._deadline_s)
        while True:
            try:
                found = next(self._iterator)
            except RuntimeError as error:
                if "DataLoader" not in str(error):
                    raise
                if not str(error).startswith("DataLoader timed out"):
                    raise RunError(f"a loader process failed: {error}") from error
                if limit.is_over:
                    raise RunError(
                        f"waited {self._deadline_s:g} s for a loader process: the data source hangs, or is slower than that"
                    ) from error
                continue
            if isinstance(found, ShoalError):
                raise found
            return found

    def close(self) -> None:
        """End them. May be called twice."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


class _Begin:
    """Ties a worker's life to its rank's; a class, because workers that are not forked have to be able to import it."""

    def __init__(self, parent: int, init: Callable[[int], None] | None) -> None:
        self._parent = parent
        self._init = init

    def __call__(self, worker: int) -> None:
        die_with_parent(self._parent)
        if self._init is not None:
            self._init(worker)


def _unchanged(found: Any) -> Any:
    return found
