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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.comm.world import World
from shoal.core.errors import RequestError, RunError
from shoal.core.seeding import derive_key
from shoal.data.batchform import BatchForm, ModelInputs, Targets, map_targets
from shoal.data.loading.parts import Part, Share, StreamPlan, build_order, options_of, order_parts, shard_plan
from shoal.data.loading.planning import plan_ahead
from shoal.data.loading.readers import Readers
from shoal.data.loading.workers import LoaderProcesses, WorkerOptions
from shoal.data.options import LoaderOptions
from shoal.data.order import Position
from shoal.data.sampling.samplers import StepOrder, draws_alone
from shoal.data.source import Items, Source, Streamed
from shoal.data.streams.shards import ShardSteps, refuse_shards, shards_itself
from shoal.data.streams.streamreader import StreamReader
from shoal.telemetry.rngstate import random_states

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
    """Weight of the part that the mean loss is over (the global batch, or the share of this island), where every sample weighs
    the same; None where the replicas have to add theirs up."""
    local_weight: float
    """Weight of this replica's part."""
    epoch: int = 0
    """That its samples are of."""
    island_samples: int = 0
    """Samples of this replica's island: all of them, where the run is one."""
    num_microbatches: int | None = None
    """Of every replica in this step, where the batch is not short; None where the plan says it."""
    load_seconds: float = 0.0
    """That loading this replica's part took, whether or not anybody waited for it."""
    later: tuple["StepBatch | None", ...] = ()
    """What this rank reads in later rounds of the step, for replicas that are absent; None in a round that leaves it nothing."""

    def __iter__(self) -> NoReturn:
        """It is no pair.

        Raises:
            RequestError: says what to do with a batch.
        """
        raise RequestError(
            "a batch of this loader is a replica's part of a step, in microbatches, and is not unpacked: write `for batch in "
            "loader`, and give it whole to run.forward_backward(batch) or run.step(batch); a step= function gets it unpacked"
        )

    def __getitem__(self, _: object) -> NoReturn:
        """It has no parts to take: see ``__iter__``."""
        self.__iter__()

    @property
    def rounds(self) -> tuple["StepBatch | None", ...]:
        """What this rank reads in each round of the step: one, where no replica is absent."""
        return (self, *self.later)

    @property
    def own_samples(self) -> int:
        """Samples of this replica."""
        return sum(len(one.sample_ids) for one in self.microbatches)

    def among(
        self, counts: Sequence[int], *, position: Position, share: Share, uniform_weight: int | None
    ) -> "StepBatch":
        """What this replica read by itself, as a part of a step in which the replicas have so many samples."""
        size = share.num_replicas // share.num_islands
        first = share.replica // size * size
        own = sum(counts[first : first + size])
        total_weight = None if uniform_weight is None else float(uniform_weight * max(1, own))
        return replace(self, num_samples=sum(counts), position=position, total_weight=total_weight, island_samples=own)


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
        num_islands: int = 1,
        seed: int = 0,
        position: Position | None = None,
        prefetch: int = 2,
        workers: int = 0,
        deadline_s: float = 300.0,
        options: LoaderOptions | None = None,
        world: World | None = None,
    ) -> None:
        """Start loading ahead.

        Args:
            source: the training split.
            global_batch: samples per step, of all replicas.
            micro_batch: samples per forward pass.
            replica: this replica's number.
            num_replicas: how many there are.
            num_islands: groups of replicas, of which each has a mean loss of its own.
            seed: of the order of samples.
            position: where to go on; the beginning when left out.
            prefetch: batches loaded ahead, by a thread that ends when loading turns out to be quick; 0 starts none.
            workers: loader processes; they are children of the thread that makes the loader and die with it.
            deadline_s: the longest wait for one batch.
            options: what else there is to say; the source's own when left out.
            world: the processes, of which those of a dataset that shards itself ask each other how far they are.

        Raises:
            RequestError: there is no sample, or the position is beyond the data, or of shards that cannot be dealt out anew.
        """
        start = position if position is not None else Position()
        self._source = source
        self._dataset = getattr(source, "dataset", None)
        self._options = options or options_of(source)
        self._deadline_s = deadline_s
        self._owner = os.getpid()
        self._stream: StreamReader | None = None
        self._shards: ShardSteps | None = None
        num_own = -(-global_batch // (num_replicas * micro_batch))
        share = Share(replica=replica, num_replicas=num_replicas, num_islands=num_islands, num_microbatches=num_own)
        self._share = share
        worker_seed = derive_key("workers", seed, start.epoch, start.offset, replica)
        processes = WorkerOptions(
            num_workers=workers,
            prefetch=prefetch,
            deadline_s=deadline_s,
            seed=worker_seed,
            init=self._options.worker_init_fn,
        )
        self._workers: LoaderProcesses | None = None
        self._is_stream = isinstance(source, Streamed)
        if isinstance(source, Streamed):
            plan = self._plan_stream(source, start, global_batch, seed, world)
            source = plan.source
            self._workers = LoaderProcesses.of_stream(plan, processes) if workers else None
            self._parts = plan.parts(self._remember)
        else:
            order = self._order(source, start, global_batch, seed)
            self._workers = (
                LoaderProcesses.of_source(source, order_parts(order, start, share), processes) if workers else None
            )
            self._parts = plan_ahead(
                source, lambda part: order_parts(self._order(source, start, global_batch, seed), start, part), share
            )
        self._prefetch = 0 if workers else prefetch
        self._num_slow = 0
        self._prefetcher: _Prefetcher | None = None
        self._readers: Readers[Part, StepBatch] | None = None
        self._is_first = True
        self.why_read_again = getattr(source, "why_not_resumable", None) if start.offset else None
        """Why what was trained on before ``position`` had to be read again, for people; None where it had not."""
        self.draws_random_numbers = False
        """True when loading a batch moved a global generator: such data is never loaded ahead, or it could not be resumed."""

    def _plan_stream(
        self, source: Streamed, start: Position, global_batch: int, seed: int, world: World | None
    ) -> StreamPlan:
        """How a stream is read: whole by every replica, or by each its own shard."""
        plan = StreamPlan(
            source=source,
            seed=seed,
            position=start,
            global_batch=global_batch,
            drop_last=self._options.drop_last,
            share=self._share,
        )
        if not shards_itself(source.dataset):
            refuse_shards(start, source.dataset)
            return plan
        plan, place = shard_plan(plan)
        self._shards = ShardSteps(world, place, start)
        return plan

    def _order(self, source: Source, start: Position, global_batch: int, seed: int) -> StepOrder:
        if len(source) == 0:
            raise RequestError(
                "the training split has 0 samples; give more data, or lower data.validation and data.test"
            )
        order = build_order(source, global_batch=global_batch, seed=seed, options=self._options)
        if start.offset >= (count := order.sampling.count(start.epoch)):
            raise RequestError(
                f"the data position is sample {start.offset} of an epoch and the data has {count} samples; "
                f"it is not the data that the checkpoint was made with"
            )
        return order

    def _remember(self, reader: StreamReader) -> None:
        self._stream = reader

    def next(self) -> StepBatch:
        """The next step's batch. All ranks call it together where the dataset shards itself.

        Raises:
            RunError: it did not come in time, or a worker process died.
            Exception: whatever the source raised while it was loading.
        """
        if self._shards is None:
            return self._next_own()
        part, counts, position = self._shards.next(self._next_own, type(self._dataset).__name__)
        weight = self._source.uniform_weight
        batch: StepBatch = part.among(counts, position=position, share=self._share, uniform_weight=weight)
        return batch

    def _next_own(self) -> StepBatch:
        if self._is_first and self._prefetch:
            return self._first()
        if self._readers is not None:
            return self._readers.next(self._deadline_s)
        if self._prefetcher is not None:
            found = self._prefetcher.next(self._deadline_s)
            if found is not None:
                return found
            self._prefetcher.close()
            self._prefetcher = None
        started = time.perf_counter()
        batch = self._next_loaded()
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
        if self._readers is not None:
            self._readers.close()
        if self._workers is not None:
            self._workers.close()

    def _first(self) -> StepBatch:
        """The first batch, while nothing else runs, to see whether this data may be loaded ahead at all."""
        self._is_first = False
        before = random_states()
        # By a thread all the same, because a source that hangs must not hang its caller.
        self._prefetcher = _Prefetcher(itertools.islice(self._endless(), 1), 1)
        batch = self._prefetcher.next(self._deadline_s)
        assert batch is not None, "one load is too few to be called quick"
        self._prefetcher.close()
        self.draws_random_numbers = before != random_states()
        # A stream that draws has generators of its own, which it puts in the place of the global ones while it reads.
        swaps = self._stream is not None and self._stream.draws_random_numbers is not False
        if self.draws_random_numbers or swaps or not self._is_drawn_alone():
            self._prefetch = 0
        self._prefetcher = None
        if self._prefetch and not self._is_stream and getattr(self._source, "waits_for_storage", False):
            self._readers = Readers(self._parts, self._load, depth=self._prefetch)
        elif self._prefetch:
            self._prefetcher = self._start_prefetcher()
        return batch

    def _start_prefetcher(self) -> "_Prefetcher":
        return _Prefetcher(self._endless(), self._prefetch)

    def _is_drawn_alone(self) -> bool:
        """False for a sampler that may draw from the global generators, which a thread must not do beside a model."""
        sampler = self._options.sampler if self._options.batch_sampler is None else self._options.batch_sampler
        return sampler is None or draws_alone(sampler)

    def _next_loaded(self) -> StepBatch:
        """The next step, loaded here or by loader processes."""
        started = time.perf_counter()
        if self._workers is not None and self._is_stream:
            part, items = self._workers.next_step()
        else:
            part = next(self._parts)
            places = range(len(part.microbatches))
            load = self._workers.next if self._workers is not None else None
            items = [load() if load is not None else part.collate(self._source, place) for place in places]
        return self._batch_of(part, items, started)

    def _load(self, part: Part) -> StepBatch:
        """A step's part as a batch; called by several threads at once."""
        started = time.perf_counter()
        items = [part.collate(self._source, place) for place in range(len(part.microbatches))]
        return self._batch_of(part, items, started)

    def _batch_of(self, part: Part, items: list[Items], started: float) -> StepBatch:
        if self._options.pin_memory and torch.cuda.is_available():
            items = [_pin(one) for one in items]
        loaded = [Microbatch.of(one, ids) for one, ids in zip(items, part.microbatches, strict=True)]
        uniform, own = self._source.uniform_weight, self._share.island_samples(part.num_samples)
        return StepBatch(
            microbatches=tuple(loaded),
            num_samples=part.num_samples,
            position=part.position,
            # At least 1, because a mean is divided by it.
            total_weight=None if uniform is None else float(uniform * max(1, own)),
            local_weight=sum(microbatch.weight for microbatch in loaded),
            epoch=part.epoch,
            island_samples=own,
            num_microbatches=self._share.num_microbatches,
            load_seconds=time.perf_counter() - started,
        )

    def _endless(self) -> Iterator[StepBatch]:
        while True:
            yield self._next_loaded()


def _pin(items: Items) -> Items:
    targets = map_targets(items.targets, Tensor.pin_memory)
    return replace(items, inputs=tuple(tensor.pin_memory() for tensor in items.inputs), targets=targets)


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
