"""What each step asks a replica to load: the ids of its microbatches, or the samples themselves where they come from a stream."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.core.errors import RequestError, RunError
from shoal.core.seeding import derive_key
from shoal.data.chosen import Chosen
from shoal.data.options import LoaderOptions
from shoal.data.order import Ids, Position, own_microbatches, replica_share
from shoal.data.sampling.replay import Replayed
from shoal.data.sampling.samplers import Sampling, Sequential, Shuffled, StepOrder, build_sampling
from shoal.data.sampling.window import Windowed
from shoal.data.source import Items, Source, Streamed
from shoal.data.streams.shards import ShardPlace, own_place
from shoal.data.streams.streamreader import StreamReader

_SIZES_SAID = "give LoaderOptions.lengths, or an attribute lengths of the dataset"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A step's share of one replica, not made to batches yet."""

    microbatches: list[Ids]
    num_samples: int
    """Samples of the global batch."""
    position: Position
    """After it."""
    epoch: int = 0
    """That its samples are of."""
    samples: list[list[Any]] | None = None
    """Of each microbatch, where they were read already."""

    @property
    def own_samples(self) -> int:
        """Samples of this replica; 0 for the end of a shard's epoch."""
        return sum(len(ids) for ids in self.microbatches)

    def collate(self, source: Source, place: int) -> Items:
        """One of its microbatches as a batch."""
        ids = self.microbatches[place]
        if self.samples is None:
            return source.collate(ids)
        assert isinstance(source, Streamed), "only a stream has read its samples already"
        return source.collate_samples(self.samples[place], [int(one) for one in ids])


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of a global batch a replica has."""

    replica: int = 0
    num_replicas: int = 1
    num_islands: int = 1
    """Groups of replicas that follow each other; each has a mean loss of its own."""
    num_microbatches: int = 1
    """Of this replica, where the batch is not short."""

    def cut(self, ids: Ids) -> list[Ids]:
        """This replica's microbatches of a global batch."""
        return own_microbatches(ids, self.replica, self.num_replicas, self.num_microbatches)

    def island_samples(self, num_samples: int) -> int:
        """Samples of a global batch that this replica's island has; none of a batch that is shorter than there are islands."""
        if self.num_islands == 1:
            return num_samples
        size, longer = divmod(num_samples, self.num_replicas * self.num_microbatches)
        parts = self.num_replicas // self.num_islands * self.num_microbatches
        first = self.replica // (self.num_replicas // self.num_islands) * parts
        return size * parts + max(0, min(longer - first, parts))


def options_of(source: Source) -> LoaderOptions:
    """How a source wants to be loaded: its ``options``, or the defaults."""
    found = getattr(source, "options", None)
    return found if isinstance(found, LoaderOptions) else LoaderOptions()


def build_order(source: Source, *, global_batch: int, seed: int, options: LoaderOptions | None = None) -> StepOrder:
    """Which samples of a source each step takes: the same for every plan.

    Args:
        source: of the samples.
        global_batch: samples of a step.
        seed: of the run.
        options: of the loader; the source's own when left out.

    Raises:
        RequestError: the options do not fit the source.
    """
    options = options or options_of(source)
    if isinstance(source, Streamed):
        # In the order in which they come; whoever reads many epochs of one goes through a loader.
        options = replace(LoaderOptions(), shuffle=False, drop_last=options.drop_last)
    sampling: Sampling = build_sampling(
        options,
        num_samples=len(source),
        seed=seed,
        blocks=getattr(source, "block_starts", None) if options.order == "window" else None,
    )
    if options.replay and isinstance(sampling, Shuffled | Sequential | Windowed):
        chosen = None if options.replay_from is None else Chosen(options.replay_from)
        sampling = Replayed(sampling, seed=seed, share=options.replay, last=options.replay_last, chosen=chosen)
    return StepOrder(
        sampling=sampling,
        global_batch=global_batch,
        drop_last=options.drop_last,
        max_tokens=options.max_tokens,
        length_of=None if options.max_tokens is None else _lengths(source, options),
    )


def order_parts(order: StepOrder, position: Position, share: Share) -> Iterator[Part]:
    """Every step of a map-style source, without end."""
    while True:
        ids, start, position = order.take(position)
        yield Part(microbatches=share.cut(ids), num_samples=len(ids), position=position, epoch=start.epoch)


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """How a stream is read; a value that a loader process can be handed."""

    source: Streamed
    seed: int
    position: Position
    global_batch: int
    drop_last: bool
    share: Share
    shard: ShardPlace | None = None
    """Where this replica begins in its shard, which ``source`` then is, of a dataset that shards itself; ``global_batch`` and
    ``share`` are then of this replica's samples alone, and an epoch is followed by one part without samples."""

    def parts(self, told: Callable[[StreamReader], None] = lambda reader: None) -> Iterator[Part]:
        """Every step of a stream, without end: the whole global batch is read, and this replica's samples are kept.

        Args:
            told: called with the reader once it is there.

        Raises:
            RunError: an epoch has no sample, or none that is not dropped.
        """
        reader = self.source.open_stream(seed=self.seed, position=self.position)
        told(reader)
        if self.shard is not None:
            yield from self._shard_parts(reader, self.shard)
        num_barren = 0
        while True:
            epoch, start = reader.epoch, reader.offset
            samples = reader.read(self.global_batch)
            if not samples or (self.drop_last and len(samples) < self.global_batch):
                # The end of an epoch, which may have been met already; a whole one without a batch has none at all.
                num_barren = num_barren + 1 if start == 0 else 0
                if num_barren == 2 or (num_barren == 1 and epoch == 0):
                    raise RunError(self._why_barren(epoch, len(samples)))
                reader.begin_next_epoch()
                continue
            num_barren = 0
            ids = np.arange(start, start + len(samples), dtype=np.int64)
            cut = self.share.cut(ids)
            yield Part(
                microbatches=cut,
                num_samples=len(samples),
                position=reader.position,
                epoch=epoch,
                samples=[samples[own[0] - start : own[-1] - start + 1] for own in cut],
            )

    def _shard_parts(self, reader: StreamReader, place: ShardPlace) -> Iterator[Part]:
        """Every step of a replica's own shard, without end; one part without samples where an epoch of the shard is over."""
        is_over = place.is_over
        while True:
            epoch, start = reader.epoch, reader.offset
            samples = [] if is_over else reader.read(self.global_batch)
            if not samples or (self.drop_last and len(samples) < self.global_batch):
                yield Part(microbatches=[], num_samples=0, position=reader.position, epoch=epoch)
                reader.begin_next_epoch()
                is_over = False
                continue
            cut = self.share.cut(np.arange(start, start + len(samples), dtype=np.int64))
            yield Part(
                # No two replicas have a number in common: dropout is drawn by it.
                microbatches=[own * place.num_replicas + place.replica for own in cut],
                num_samples=len(samples),
                position=reader.position,
                epoch=epoch,
                samples=[samples[own[0] - start : own[-1] - start + 1] for own in cut],
            )

    def _why_barren(self, epoch: int, num_samples: int) -> str:
        name = type(self.source.dataset).__name__
        if num_samples:
            return (
                f"{name} yields {num_samples} samples in epoch {epoch} and drop_last leaves out batches below "
                f"{self.global_batch}; set global_batch to {num_samples} or less, or drop_last=False"
            )
        if epoch == 0:
            return f"{name} yields no sample; the training data is empty"
        return (
            f"{name} yields no sample in epoch {epoch}: once it was read to its end, iterating it again must begin anew; let "
            "__iter__ do so, or train for fewer steps"
        )


def shard_plan(plan: StreamPlan) -> tuple[StreamPlan, ShardPlace]:
    """How a replica reads its own shard of a dataset that shards itself, and where it begins in it.

    Args:
        plan: as if every replica read the whole stream.

    Raises:
        RequestError: the position is of another number of replicas, and what is left cannot be dealt out anew.
    """
    share = plan.share
    source = plan.source.take_shard(replica=share.replica, num_replicas=share.num_replicas)
    place = own_place(
        plan.position,
        plan.source.dataset,
        replica=share.replica,
        num_replicas=share.num_replicas,
        why_no_state=lambda: getattr(source, "why_not_resumable", None),
    )
    own = Share(num_microbatches=share.num_microbatches)
    size = len(replica_share(np.arange(plan.global_batch), share.replica, share.num_replicas))
    # A shard that is over is not read again up to its end.
    offset, stream = (0, "") if place.is_over else (place.offset, place.stream)
    at = Position(epoch=plan.position.epoch, offset=offset, stream=stream)
    seed = derive_key("shard", plan.seed, share.replica)
    return (
        replace(plan, source=source, seed=seed, position=at, global_batch=size, share=own, shard=place),
        place,
    )


def _lengths(source: Source, options: LoaderOptions) -> Callable[[int], int]:
    """The length of each sample: as it was said, or found by reading."""
    told = options.lengths if options.lengths is not None else getattr(source, "lengths", None)
    if told is not None:
        if len(told) != len(source):
            raise RequestError(f"there are {len(told)} lengths and {len(source)} samples; {_SIZES_SAID}")
        known = told
        return lambda number: int(known[number])
    found: dict[int, int] = {}

    def read(number: int) -> int:
        if number not in found:
            first = source.collate([number]).inputs[0]
            if first.ndim < 2:
                raise RequestError(
                    f"max_tokens asks for the length of sample {number}, and its first input has no length (a batch of it has "
                    f"the shape {tuple(first.shape)}); {_SIZES_SAID}"
                )
            found[number] = first.shape[1]
        return found[number]

    return read
