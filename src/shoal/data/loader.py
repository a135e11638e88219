"""Batches for one replica, in the global order, loaded ahead.

torch's ``DataLoader`` with a ``DistributedSampler`` is not used for the order: it pads or drops the last samples and cannot
resume on another number of processes. Its worker processes are used where the user asks for them. The position handed out is the
one after the batch that ``next()`` returned, never after one that was only loaded ahead, so a checkpoint neither repeats nor
skips a sample.
"""

import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.comm.parentdeath import die_with_parent
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError, ShoalError
from shoal.core.seeding import derive_key
from shoal.data.batchform import BatchForm, ModelInputs, Targets
from shoal.data.order import Ids, Position, own_microbatches, permute, take
from shoal.data.sharedmemory import SharedBatch, SharedBatchWriter
from shoal.data.source import Items, Source
from shoal.telemetry.rngstate import random_states

_ORDER_AHEAD = 4096
_LOOK_SECONDS = 2.0
# Handing a batch from thread to thread was measured to cost a step 0.3 ms, because both want the interpreter at the same time; a
# batch that loads faster than this is better loaded when it is asked for.
_WORTH_A_THREAD_S = 1e-3
_SLOW_IN_A_ROW = 3
_QUICK_IN_A_ROW = 12


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What one forward pass reads."""

    inputs: tuple[Tensor, ...]
    targets: Targets
    sample_ids: NDArray[np.int64]
    """Global dataset ids, in the order of dim 0."""
    weight: float
    """Items that its mean loss is over."""
    form: BatchForm | None = None
    """How the tensors make the call of the model; None for ``model(*inputs)`` and ``loss(output, targets)``."""

    @classmethod
    def of(cls, items: Items, ids: NDArray[np.int64]) -> "Microbatch":
        """The samples with these ids, as a source has collated them."""
        weight = float(items.weight)
        return cls(inputs=items.inputs, targets=items.targets, sample_ids=ids, weight=weight, form=items.form)

    @property
    def model_inputs(self) -> ModelInputs:
        """The inputs with their form, to be handed to ``call_model``."""
        return ModelInputs(self.inputs, self.form)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What one replica reads in one step."""

    microbatches: tuple[Microbatch, ...]
    """Empty where the global batch has fewer samples than there are replicas."""
    num_samples: int
    """Samples of the global batch, of all replicas."""
    position: Position
    """Where the data is after this batch; it goes into the checkpoint."""
    total_weight: float | None
    """Weight of the global batch where every sample weighs the same; None where the replicas have to add theirs up."""
    local_weight: float
    """Weight of this replica's part."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A step's share of one replica, still as ids."""

    microbatches: list[Ids]
    num_samples: int
    position: Position


class Loader:
    """An endless sequence of steps, epoch after epoch. One thread calls ``next()``; ``close()`` when done."""

    def __init__(
        self,
        source: Source,
        *,
        global_batch: int,
        micro_batch: int,
        replica: int = 0,
        num_replicas: int = 1,
        seed: int = 0,
        position: Position | None = None,
        prefetch: int = 2,
        workers: int = 0,
        deadline_s: float = 300.0,
    ) -> None:
        """Start loading ahead.

        Args:
            source: the training split.
            global_batch: samples per step, of all replicas.
            micro_batch: samples per forward pass.
            replica: this replica's number.
            num_replicas: how many there are.
            seed: of the order of samples.
            position: where to go on; the beginning when left out.
            prefetch: batches loaded ahead, by a thread that ends when loading turns out to be quick; 0 starts none.
            workers: loader processes; they are children of the thread that makes the loader and die with it.
            deadline_s: the longest wait for one batch.

        Raises:
            RequestError: there is no sample, or the position is beyond the data.
        """
        start = position if position is not None else Position()
        if len(source) == 0:
            raise RequestError(
                "the training split has 0 samples; give more data, or lower data.validation and data.test"
            )
        if start.offset >= len(source):
            raise RequestError(
                f"the data position is sample {start.offset} of an epoch and the data has {len(source)} samples; "
                f"it is not the data that the checkpoint was made with"
            )
        self._source = source
        self._deadline_s = deadline_s
        self._owner = os.getpid()
        plan = (len(source), global_batch, micro_batch, replica, num_replicas, seed)
        self._parts = _parts(start, *plan)
        worker_seed = derive_key("workers", seed, start.epoch, start.offset, replica)
        self._workers = (
            _Workers(source, _parts(start, *plan), workers, prefetch, deadline_s, worker_seed) if workers else None
        )
        self._prefetch = 0 if workers else prefetch
        self._num_slow = 0
        self._prefetcher: _Prefetcher | None = None
        self._is_first = True
        self.draws_random_numbers = False
        """True when loading a batch moved a global generator: such data is never loaded ahead, or it could not be resumed."""

    def next(self) -> StepBatch:
        """The next step's batch.

        Raises:
            RunError: it did not come in time, or a worker process died.
            Exception: whatever the source raised while it was loading.
        """
        if self._is_first and self._prefetch:
            return self._first()
        if self._prefetcher is not None:
            found = self._prefetcher.next(self._deadline_s)
            if found is not None:
                return found
            self._prefetcher.close()
            self._prefetcher = None
        started = time.perf_counter()
        batch = self._load(next(self._parts))
        if self._prefetch:
            is_slow = time.perf_counter() - started > _WORTH_A_THREAD_S
            self._num_slow = self._num_slow + 1 if is_slow else 0
            if self._num_slow == _SLOW_IN_A_ROW:
                self._num_slow = 0
                self._prefetcher = self._start_prefetcher()
        return batch

    def close(self) -> None:
        """Stop loading ahead; returns at once even when a load hangs. May be called twice."""
        if os.getpid() != self._owner:
            return  # What a fork of this process ends with is not its to end.
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self._workers is not None:
            self._workers.close()

    def _first(self) -> StepBatch:
        """The first batch, while nothing else runs, to see whether this data may be loaded ahead at all."""
        self._is_first = False
        before = random_states()
        # By a thread all the same, because a source that hangs must not hang its caller.
        self._prefetcher = _Prefetcher(itertools.islice((self._load(part) for part in self._parts), 1), 1)
        batch = self._prefetcher.next(self._deadline_s)
        assert batch is not None, "one load is too few to be called quick"
        self._prefetcher.close()
        self.draws_random_numbers = before != random_states()
        if self.draws_random_numbers:
            self._prefetch = 0
        self._prefetcher = self._start_prefetcher() if self._prefetch else None
        return batch

    def _start_prefetcher(self) -> "_Prefetcher":
        return _Prefetcher((self._load(part) for part in self._parts), self._prefetch)

    def _load(self, part: _Part) -> StepBatch:
        loaded = []
        for ids in part.microbatches:
            items = self._workers.next() if self._workers is not None else self._source.collate(ids)
            loaded.append(Microbatch.of(items, ids))
        uniform = self._source.uniform_weight
        return StepBatch(
            microbatches=tuple(loaded),
            num_samples=part.num_samples,
            position=part.position,
            total_weight=None if uniform is None else float(uniform * part.num_samples),
            local_weight=sum(microbatch.weight for microbatch in loaded),
        )


def _parts(
    position: Position,
    num_samples: int,
    global_batch: int,
    micro_batch: int,
    replica: int,
    num_replicas: int,
    seed: int,
) -> Iterator[_Part]:
    order = _Order(seed, num_samples)
    num_own = -(-global_batch // (num_replicas * micro_batch))
    while True:
        epoch = position.epoch
        taken, position = take(position, num_samples, global_batch)
        own = own_microbatches(order.ids(epoch, taken), replica, num_replicas, num_own)
        yield _Part(microbatches=own, num_samples=taken.stop - taken.start, position=position)


class _Order:
    """The order of an epoch, worked out many positions at a time: for a few ids numpy costs as much as for thousands."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self._seed = seed
        self._num_samples = num_samples
        self._epoch = -1
        self._start = 0
        self._ids: Ids = np.empty(0, dtype=np.int64)

    def ids(self, epoch: int, taken: slice) -> Ids:
        """The sample ids at these positions of an epoch."""
        is_known = epoch == self._epoch and self._start <= taken.start and taken.stop <= self._start + len(self._ids)
        if not is_known:
            stop = min(max(taken.stop, taken.start + _ORDER_AHEAD), self._num_samples)
            positions = np.arange(taken.start, stop, dtype=np.int64)
            self._epoch, self._start = epoch, taken.start
            self._ids = permute(self._seed, epoch, self._num_samples, positions)
        return self._ids[taken.start - self._start : taken.stop - self._start]


class _Prefetcher:
    """A daemon thread that keeps a bounded queue full. What it raises is raised by the caller's ``next()``.

    When the first loads are all quick it puts None and ends: whoever takes that can load by himself from the same iterator.
    """

    def __init__(self, batches: Iterator[StepBatch], depth: int) -> None:
        self._batches = batches
        self._queue: queue.Queue[StepBatch | BaseException | None] = queue.Queue(maxsize=depth)
        self._is_closed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def next(self, deadline_s: float) -> StepBatch | None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed.is_set():
            raise RunError("the loader was asked for a batch after close()")
        try:
            found = self._queue.get(timeout=deadline_s)
        except queue.Empty:
            raise RunError(
                f"waited {deadline_s:g} s for the next batch: the data source hangs, or is slower than that"
            ) from None
        if isinstance(found, BaseException):
            self._failure = found
            raise found
        return found

    def close(self) -> None:
        self._is_closed.set()
        # Makes room, so that a thread that waits to put sees the closing at once.
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        num_quick = 0
        try:
            while not self._is_closed.is_set():
                started = time.perf_counter()
                batch = next(self._batches)
                is_quick = time.perf_counter() - started < _WORTH_A_THREAD_S
                num_quick = num_quick + 1 if is_quick else 0
                self._put(batch)
                if num_quick == _QUICK_IN_A_ROW:
                    self._put(None)
                    return
        except BaseException as error:  # Handed over whole: it belongs to whoever asks for the batch.
            self._put(error)

    def _put(self, found: StepBatch | BaseException | None) -> None:
        while not self._is_closed.is_set():
            try:
                self._queue.put(found, timeout=0.1)
                return
            except queue.Full:
                continue


class _WorkerDataset(torch.utils.data.Dataset["SharedBatch | Items | ShoalError"]):
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


class _Workers:
    """torch's loader processes, each making whole microbatches, handed back in order."""

    def __init__(
        self, source: Source, parts: Iterator[_Part], workers: int, prefetch: int, deadline_s: float, seed: int
    ) -> None:
        self._deadline_s = deadline_s
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            # Each worker has at most the prefetched ones and the one that is being opened here in its hands.
            _WorkerDataset(source, SharedBatchWriter(keep=max(1, prefetch) + 2)),
            batch_size=None,
            sampler=(ids for part in parts for ids in part.microbatches),
            num_workers=workers,
            prefetch_factor=max(1, prefetch),
            collate_fn=_unchanged,  # type: ignore[arg-type]
            worker_init_fn=_DieWithParent(os.getpid()),
            # A worker that exits with 0 is only looked for when this has passed.
            timeout=min(_LOOK_SECONDS, deadline_s),
            # Otherwise torch draws the workers' seed from the global generator, which a resumed run has just put back.
            generator=torch.Generator().manual_seed(seed),
        )
        # Made here, not in a thread: a worker dies with the thread that started it.
        self._iterator: Iterator[SharedBatch | Items | ShoalError] | None = iter(loader)

    def next(self) -> Items:
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
            return found.open() if isinstance(found, SharedBatch) else found

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


class _DieWithParent:
    """Ties a worker's life to its rank's; a class, because workers that are not forked have to be able to import it."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self, worker: int) -> None:
        die_with_parent(self._parent)


def _unchanged(items: SharedBatch | Items | ShoalError) -> SharedBatch | Items | ShoalError:
    return items
